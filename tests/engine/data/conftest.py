"""Small corpora on disk, of which every token is known."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from triaxis.engine.data.corpus.indexed import IndexedWriter

Documents = list[NDArray[np.int64]]


@pytest.fixture
def write_corpus(tmp_path: Path) -> Callable[..., str]:
    """write_corpus(documents, name, dtype) -> prefix"""

    def write(documents: Documents, name: str = "corpus", dtype: str = "uint16") -> str:
        prefix = str(tmp_path / name)
        with IndexedWriter(prefix, dtype) as writer:
            for document in documents:
                writer.add_document(document)
        return prefix

    return write


@pytest.fixture
def numbered_documents() -> Documents:
    """40 documents of 1 to 60 tokens, all tokens different: a token says where it comes from."""
    lengths = np.random.default_rng(5).integers(1, 61, 40)
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]
