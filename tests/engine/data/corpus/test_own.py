"""Corpora of an extension: the same samples as from a pair of files with the same documents, and mistakes by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from triaxis.engine.config.schema.data import DataConfig
from triaxis.engine.config.schema.extension_parts import Extension
from triaxis.engine.config.values.sources import Source
from triaxis.engine.data.corpus.indexed import IndexedWriter
from triaxis.engine.data.corpus.own import OwnCorpus, open_corpus
from triaxis.engine.data.datasets import open_datasets
from triaxis.engine.errors import DataError

DOCUMENTS = [np.arange(start, start + length) % 200 for start, length in [(0, 30), (7, 1), (50, 0), (90, 64), (3, 41)]]


class Documents:
    def __init__(self, argument: str = "") -> None:
        self.argument = argument

    def __len__(self) -> int:
        return len(DOCUMENTS)

    def lengths(self) -> Any:
        return [len(one) for one in DOCUMENTS]

    def __getitem__(self, number: int) -> Any:
        return DOCUMENTS[number]


OWN = Extension(corpora={"mine": Documents})


def test_samples_are_those_of_a_pair_of_files(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "pair", np.int32) as writer:
        for one in DOCUMENTS:
            writer.add_document(one)
    pair, own = (
        open_datasets(
            DataConfig(train=[Source(path=path)], split=(1, 0, 0), cache_dir=str(tmp_path)),
            8,
            5,
            vocab_size=200,
            own=OWN,
        )
        for path in (str(tmp_path / "pair"), "extension:mine:and:more")
    )
    for number in range(40):  # more than two epochs
        ours, theirs = own.train[number], pair.train[number]
        assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.lengths == theirs.lengths
    assert own.fingerprint != pair.fingerprint


def test_a_path_has_a_name_and_an_argument() -> None:
    corpus = open_corpus("extension:mine:and:more", OWN)
    assert isinstance(corpus, OwnCorpus) and corpus.num_tokens == 136 and corpus.cache_dir == Path("and:more.cache")
    assert open_corpus("extension:mine", OWN).cache_dir == Path("mine.cache")
    assert corpus.last_tokens(np.arange(5)).tolist() == [29, 7, -1, 153, 43] and corpus.ids(10) == (0, 153)
    assert corpus.tokens(3, 2, 5).tolist() == [92, 93, 94] and corpus.document_lengths(range(1, 4)).tolist() == [
        1,
        0,
        64,
    ]


def test_the_fingerprint_is_that_of_the_tokens() -> None:
    def fingerprint(change: str) -> str:
        class Changed(Documents):
            def __getitem__(self, number: int) -> Any:
                return DOCUMENTS[number] + (number == 4 and change == "token")

            def lengths(self) -> Any:
                return super().lengths()

        return OwnCorpus(f"extension:{change}", Changed()).fingerprint

    assert fingerprint("") == fingerprint("path") != fingerprint("token")


@pytest.mark.parametrize(
    ("lengths", "item", "says"),
    [
        ([1.0] * 5, None, "lengths\\(\\) gives float64 \\[5\\]"),
        ([3, 3], None, "of each of its 5 documents"),
        ([0, 0, 0, 0, -1], None, "at least 0"),
        ([0] * 5, None, "has no token"),
        (None, [1.5, 2.5], "document 0 is float64 \\[2\\]; it must be 30 whole numbers"),
        (None, [[1]], "it must be 30 whole numbers"),
        (None, [1, 2], "it must be 30 whole numbers"),
    ],
)
def test_mistakes_of_a_corpus_are_named(lengths: Any, item: Any, says: str) -> None:
    class Wrong(Documents):
        def lengths(self) -> Any:
            return super().lengths() if lengths is None else lengths

        def __getitem__(self, number: int) -> Any:
            return item

    with pytest.raises(DataError, match=says):
        OwnCorpus("extension:wrong", Wrong()).tokens(0)


def test_a_file_that_is_not_there_is_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match="extension:gone:x cannot be opened"):
        open_corpus("extension:gone:x", Extension(corpora={"gone": lambda name: np.load(f"/nowhere/{name}")}))
