"""Windows over a text: every token is counted once, after the tokens that precede it, whatever the stride."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from triaxis.engine.data.corpus.indexed import IndexedTokens, IndexedWriter
from triaxis.engine.errors import DataError
from triaxis.models.inference.evaluate import CorpusTokens, ListedTokens, Windows

BEFORE = 999


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """(tokens, seq_length, stride)"""
    seq_length = draw(st.integers(1, 12))
    return draw(st.lists(st.integers(0, 50), max_size=60)), seq_length, draw(st.integers(1, seq_length))


@given(texts(), st.integers(0, 3))
def test_each_token_is_predicted_once_from_what_precedes_it(case: tuple[list[int], int, int], past: int) -> None:
    tokens, length, stride = case
    windows = Windows(ListedTokens(tokens), BEFORE, seq_length=length, stride=stride, vocab_size=1000)
    stream = [BEFORE, *tokens]
    counted: list[int] = []
    for index in range(windows.num_windows + past):
        window = windows[index]
        assert window.tokens.shape == (length + 1,)
        assert window.loss_mask.shape == (length,)
        start = index * stride
        for at in np.flatnonzero(window.loss_mask).tolist():
            assert window.tokens[: at + 2].tolist() == stream[start : start + at + 2]
            assert index == 0 or at >= length - stride, "too little context"
            counted.append(start + at)
    assert counted == list(range(len(tokens)))


@pytest.fixture
def corpus(tmp_path) -> tuple[IndexedTokens, list[int]]:
    documents = [[1, 2, 3, 0], [4, 0], [], [5, 6, 7, 8, 9, 0], [0]]
    with IndexedWriter(tmp_path / "corpus", "<u2") as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedTokens(tmp_path / "corpus"), [token for document in documents for token in document]


@pytest.mark.parametrize("limit", [None, 1, 5, 12, 13, 100])
def test_a_corpus_is_its_documents_one_after_another(corpus, limit) -> None:
    indexed, tokens = corpus
    text = CorpusTokens(indexed, limit)
    tokens = tokens[:limit]
    assert text.num_tokens == len(tokens)
    for start in range(len(tokens) + 2):
        for stop in range(start, len(tokens) + 3):
            assert text.read(start, stop).tolist() == tokens[start:stop]


def test_a_token_without_an_embedding_is_refused() -> None:
    windows = Windows(ListedTokens([1, 2, 3, 4, 50]), 0, seq_length=4, stride=4, vocab_size=50)
    assert windows[0].loss_mask.all()
    with pytest.raises(DataError, match=r"50 \.\. 50 stand in window 1"):
        windows[1]
