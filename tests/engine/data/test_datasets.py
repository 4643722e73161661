"""The entry of training: splits, explicit validation, blends, and mistakes found when it opens."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triaxis.engine.config.load import load_config
from triaxis.engine.config.schema.data import DataConfig
from triaxis.engine.data import datasets as datasets_module
from triaxis.engine.data.datasets import (
    Datasets,
    doubts,
    open_datasets,
    other_ends,
    read_again,
    trained_and_validated,
    unbroken_corpora,
)
from triaxis.engine.data.samples import SampleSource
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.errors import DataError
from triaxis.launch.prepare.prepare import PrepareRequest, prepare


@pytest.fixture
def corpora(write_corpus: Callable[..., str]) -> tuple[str, str]:
    """Two corpora of 20 documents of 50 tokens; a // 50 is the document, the second begins at 1000."""
    first = [np.arange(start, start + 50) for start in range(0, 1000, 50)]
    return write_corpus(first, "first"), write_corpus([document + 1000 for document in first], "second")


def opened(seed: int = 7, cache_dir: Path | None = None, vocab_size: int = 2000, **fields: Any) -> Datasets:
    return open_datasets(DataConfig(**fields), 10, seed, cache_dir, vocab_size=vocab_size)


def tokens_of(source: SampleSource | None, num_samples: int = 300) -> set[int]:
    assert source is not None
    return {token for sample_id in range(num_samples) for token in source[sample_id].tokens.tolist()}


def test_a_split_keeps_documents_apart(corpora: tuple[str, str]) -> None:
    datasets = opened(train=[corpora[0]], split=(80, 10, 10))
    assert tokens_of(datasets.train) == set(range(800))
    assert tokens_of(datasets.valid) == set(range(800, 900))
    assert tokens_of(datasets.test) == set(range(900, 1000))
    without = opened(train=[corpora[0]], split=(90, 10, 0))
    assert without.test is None


def test_validation_corpora_of_their_own(corpora: tuple[str, str]) -> None:
    datasets = opened(train=[corpora[0]], valid=[corpora[1]])
    assert tokens_of(datasets.train) == set(range(1000))
    assert tokens_of(datasets.valid) == set(range(1000, 2000))
    assert datasets.test is None


def test_a_corpus_under_two_names_is_refused(corpora: tuple[str, str], tmp_path: Path) -> None:
    """The same samples would come again as others."""
    (tmp_path / "link").symlink_to(Path(corpora[0]).parent)
    for again in (corpora[0], f"{Path(corpora[0]).parent}/./first", str(tmp_path / "link" / "first")):
        with pytest.raises(DataError, match=r"data\.train names one corpus twice, as .*first and as"):
            opened(train=[{"path": corpora[0]}, {"path": again}])


def test_a_corpus_that_is_trained_and_validated_is_refused_or_said(corpora: tuple[str, str], tmp_path: Path) -> None:
    """By another name it is a mistake; by one name it is meant, and a copy may be."""
    for suffix in (".bin", ".idx"):
        (tmp_path / f"hard{suffix}").hardlink_to(f"{corpora[0]}{suffix}")
        shutil.copy(f"{corpora[0]}{suffix}", tmp_path / f"copy{suffix}")
    for again in (str(tmp_path / "hard"), f"{tmp_path}/./first"):
        with pytest.raises(DataError, match=r"data\.train with data\.valid names one corpus twice, as .*first and as"):
            opened(train=list(corpora), valid=[again])
    for said in (corpora[0], str(tmp_path / "copy")):
        assert trained_and_validated(opened(train=list(corpora), valid=[said])) == [said]
    assert trained_and_validated(opened(train=[corpora[0]], valid=[corpora[1]])) == []
    assert trained_and_validated(opened(train=[corpora[0]], split=(50, 50, 0))) == []


def test_documents_that_end_with_another_id_are_named(write_corpus: Callable[..., str]) -> None:
    good, other = (
        write_corpus([np.array([5, 6, 7, 9])] * 9, "good"),
        write_corpus([np.array([5, 6, 7, 2])] * 9, "other"),
    )
    train = opened(train=[good, other], split=(1, 0, 0)).train
    text = "{}: 9 of the first 9 documents do not end with id {}, the tokenizer's end of a document; most of them end with id {}."
    for corpus, end, most in ((other, 9, 2), (good, 2, 9)):
        (said,) = other_ends(train, end)
        assert said.startswith(text.format(corpus, end, most))


@pytest.mark.parametrize("wrong", [-1, 2000])
def test_ids_without_an_embedding_are_found_at_the_start(write_corpus: Callable[..., str], wrong: int) -> None:
    documents = [np.arange(50), np.array([3, wrong])]
    with pytest.raises(DataError, match=r"has ids from -?\d to [\d,]+, but model\.vocab_size = 2,000"):
        opened(train=[write_corpus(documents, "wrong", dtype="int32")])


def test_a_blend_keeps_its_weights(corpora: tuple[str, str]) -> None:
    datasets = opened(train=[{"path": corpora[0], "weight": 3.0}, corpora[1]], split=(90, 10, 0))
    for source in (datasets.train, datasets.valid):
        assert source is not None
        from_second = [source[sample_id].tokens[0] >= 1000 for sample_id in range(400)]
        assert sum(from_second) == 100


def test_the_fingerprint_is_that_of_the_samples(corpora: tuple[str, str], tmp_path: Path) -> None:
    first, second = corpora
    base: dict[str, Any] = {"train": [first], "split": (90, 10, 0)}
    same = opened(**base, cache_dir=tmp_path / "elsewhere").fingerprint
    assert same == opened(**base).fingerprint
    others = [
        opened(**base, seed=8),
        opened(**(base | {"split": (80, 20, 0)})),
        opened(**(base | {"train": [second]})),
        opened(**(base | {"train": [first, second]})),
        opened(**(base | {"train": [{"path": first, "weight": 2.0}, second]})),
        opened(**(base | {"valid": [second]})),
        opened(synthetic=True),
    ]
    assert len({same, *(datasets.fingerprint for datasets in others)}) == 1 + len(others)


def test_caches_are_where_they_were_asked_for(corpora: tuple[str, str], tmp_path: Path) -> None:
    opened(train=[corpora[0]], split=(1, 0, 0)).train[0]
    assert list(Path(f"{corpora[0]}.cache").glob("*.index"))
    opened(train=[corpora[1]], split=(1, 0, 0), cache_dir=tmp_path / "given").train[0]
    assert len(list((tmp_path / "given").glob("*.index"))) == 1
    config = DataConfig(train=[corpora[1]], split=(1, 0, 0), cache_dir=str(tmp_path / "configured"))
    open_datasets(config, 10, 7, vocab_size=2000).train[0]
    assert len(list((tmp_path / "configured").glob("*.index"))) == 1
    assert not Path(f"{corpora[1]}.cache").exists()


def test_synthetic_parts_differ() -> None:
    datasets = opened(synthetic=True, vocab_size=30)
    assert datasets.valid is not None
    assert datasets.train[0].tokens.tolist() != datasets.valid[0].tokens.tolist()
    assert tokens_of(datasets.train) == set(range(30))


def test_mistakes_are_found_when_it_opens(corpora: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing\.idx does not exist"):
        opened(train=[str(tmp_path / "missing")])
    with pytest.raises(DataError, match=r"20 documents.*test would be empty"):
        opened(train=[corpora[0]], split=(98, 3, 1))
    (tmp_path / "a.txt").write_text("some text")
    request = PrepareRequest((tmp_path / "a.txt",), "bytes", str(tmp_path / "prepared"))
    prepare(request, num_workers=1, progress=lambda done: None)
    with pytest.raises(DataError, match=r"Set model\.vocab_size=257"):
        opened(train=[str(tmp_path / "prepared")], split=(1, 0, 0), vocab_size=256)
    assert json.loads((tmp_path / "prepared.json").read_text())["num_tokens"] == 10


def test_a_corpus_without_document_ends_is_named(write_corpus: Callable[..., str], tmp_path: Path) -> None:
    broken, sound = write_corpus([np.arange(3000) % 50], "broken"), write_corpus([np.arange(30)] * 100, "sound")
    train = open_datasets(
        DataConfig(train=[broken, sound], split=(1, 0, 0), cache_dir=str(tmp_path)), 16, 1, vocab_size=50
    ).train
    assert unbroken_corpora(train) == [broken]
    # 187 samples of each are an epoch; of an odd number the first corpus gives one more.
    assert read_again(train, 374) == read_again(SyntheticDataset(1, 50, 16), 10**6) == []
    for corpus, said in zip((broken, sound), read_again(train, 376), strict=True):
        assert said.startswith(f"asks {corpus} for 188 samples, but its part holds 187: each is read up to 2 times")
    assert len(read_again(train, 375)) == 1
    config = load_config(
        Path("configs/gpt_tiny.yaml"), ["eval.interval=5", "eval.steps=100", "data.attention=within"], {}
    )
    said = list(doubts(Datasets(train, train, None, "", lambda skipped: train), config, 29))
    assert [label for label, _ in said] == ["documents", *4 * ["validation"], "documents"]
    texts = [text for _, text in said]
    assert texts[0].startswith(f"{broken}: documents are longer than 100 samples on average")
    assert "times, which does not make the loss more exact" in texts[2] and texts[5].startswith(
        f"{broken}: 1 of the first 1"
    )
    assert texts[4] == f"{sound} is also training data: the loss is not that of unseen text"


TENSORS = ("documents", "loader", "sequence_part")
"""Modules that make tensors."""


def test_only_batches_import_torch() -> None:
    room = Path(datasets_module.__file__).parent
    modules = sorted(".".join(path.relative_to(room).with_suffix("").parts) for path in room.rglob("*.py"))
    assert {"samples", "corpus.record", *TENSORS} < set(modules)
    imports = "; ".join(
        f"import triaxis.engine.data.{name}" for name in modules if "__init__" not in name and name not in TENSORS
    )
    code = f"{imports}; import sys; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
