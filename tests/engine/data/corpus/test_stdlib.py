"""The built-in corpus is real text of the running Python, and entropies are those of the textbook."""

import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from triaxis.engine.data.corpus import stdlib as corpus
from triaxis.engine.data.corpus.indexed import IndexedTokens
from triaxis.engine.data.corpus.stdlib import entropies, stdlib_files
from triaxis.engine.errors import DataError
from triaxis.launch.prepare.prepare import PrepareRequest, prepare


def test_stdlib_files_are_sources_up_to_a_size() -> None:
    files = stdlib_files(2_000_000)
    root = Path(sysconfig.get_paths()["stdlib"])
    total = sum(path.stat().st_size for path in files)
    assert 1_500_000 < total <= 2_000_000
    assert len(set(files)) == len(files) > 50
    assert all(
        path.suffix == ".py" and path.is_relative_to(root) and "site-packages" not in path.parts for path in files
    )
    assert list(files) != sorted(files)
    assert set(stdlib_files(1_000_000)) < set(files), "a larger corpus contains a smaller one"


def test_a_split_of_the_stdlib_holds_back_text_like_the_rest(tmp_path: Path) -> None:
    prefix = str(tmp_path / "stdlib")
    request = PrepareRequest(stdlib_files(2_000_000), "bytes", prefix)
    record = prepare(request, num_workers=1, progress=lambda done: None).record
    assert record.num_tokens == record.input_bytes + record.num_documents
    whole = entropies(IndexedTokens(prefix), 257)
    assert whole["uniform"] == math.log(257)
    assert 2.0 < whole["bigram entropy"] < 2.8 < whole["unigram entropy"] < 3.6
    held_back = entropies(IndexedTokens(prefix).tokens(record.num_documents - 1), 257)
    assert held_back["bigram entropy"] < whole["unigram entropy"]


def test_entropies_of_known_sources() -> None:
    cycle = np.tile(np.arange(4), 1000)
    known = entropies(cycle, 8)
    assert known["uniform"] == pytest.approx(math.log(8))
    assert known["unigram entropy"] == pytest.approx(math.log(4))
    assert known["bigram entropy"] == pytest.approx(0, abs=1e-6), "a token decides the next one"
    independent = np.random.default_rng(0).choice(3, 300_000, p=[0.5, 0.25, 0.25])
    known = entropies(independent, 3)
    assert known["unigram entropy"] == pytest.approx(1.5 * math.log(2), abs=0.005)
    assert known["bigram entropy"] == pytest.approx(known["unigram entropy"], abs=0.001)


def test_both_ways_of_counting_pairs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(1).zipf(1.5, 5000) % 40
    table = entropies(tokens, 40)
    monkeypatch.setattr(corpus, "LARGEST_PAIR_TABLE", 0)
    assert entropies(tokens, 40)["bigram entropy"] == pytest.approx(table["bigram entropy"], rel=1e-12)


def test_only_the_first_tokens_are_counted(write_corpus: object) -> None:
    prefix = write_corpus([np.zeros(10, np.int64), np.arange(50)])  # type: ignore[operator]
    assert entropies(IndexedTokens(prefix), 50, max_tokens=10)["unigram entropy"] == 0
    known = entropies(np.array([0] * 11 + [1]), 50)
    assert entropies(IndexedTokens(prefix), 50, max_tokens=12)["unigram entropy"] == known["unigram entropy"]


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    for tokens in (np.array([0, 5]), np.array([-1, 0]), np.array([1])):
        with pytest.raises(DataError, match=r"at least two tokens in 0 \.\. 4"):
            entropies(tokens, 5)
