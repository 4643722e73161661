"""Builds an epoch's document and sample orders once per node, in a hashed cache file.

    document_order  int64 [D]      document numbers in this epoch's order; 0 is the first document in the split
    token_offsets   int64 [D + 1]  each document's start in the epoch's token stream, in that order, then the stream's length
    sample_order    int64 [n]      index of each sample in the stream, in training order

Each order depends on the seed, the epoch and its number of elements, never on the run length. So a longer run extends a shorter
one. An epoch also keeps its token stream if it is cut into samples of another length (`engine/data/remainder.py`).
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.data import order_pieces
from triaxis.engine.data.index_cache import Progress, key_digest, open_numbers
from triaxis.engine.data.shuffle import permutation


@dataclass(frozen=True, slots=True)
class EpochKey:
    """The inputs that decide an epoch's order."""

    corpus: str
    """Corpus fingerprint."""
    first_document: int
    last_document: int
    """Number after the last document's."""
    seq_length: int
    seed: int
    epoch: int

    def text(self) -> str:
        return json.dumps([getattr(self, name) for name in self.__slots__])

    def file_name(self) -> str:
        return f"epoch-{self.epoch:04d}-{key_digest(self.text())}.index"


@dataclass(frozen=True, slots=True, eq=False)
class EpochIndex:
    """One epoch's document order, document starts (in tokens) and sample order (see the module)."""

    document_order: NDArray[np.int64]
    token_offsets: NDArray[np.int64]
    sample_order: NDArray[np.int64]


def build_epoch(key: EpochKey, document_lengths: NDArray[np.int64], num_samples: int) -> EpochIndex:
    """Build an epoch's order in memory from its key and the document lengths, int64 [D]."""
    order = permutation(len(document_lengths), "documents", key.seed, key.epoch)
    offsets = np.zeros(len(order) + 1, np.int64)
    np.cumsum(document_lengths[order], out=offsets[1:])
    return EpochIndex(order, offsets, permutation(num_samples, "samples", key.seed, key.epoch))


def open_epoch(
    cache_dir: Path,
    key: EpochKey,
    document_lengths: NDArray[np.int64],
    num_samples: int,
    progress: Progress | None = None,
) -> EpochIndex:
    """Open the epoch's order from its cache file.

    The first process on a node builds the file while the others wait. An order of more than `order_pieces.PIECE` numbers is built
    in pieces. `progress` is notified after each piece, and a killed process loses at most one piece.

    Raises:
        DataError: the cache folder cannot be read or written.
    """
    counts = (len(document_lengths), len(document_lengths) + 1, num_samples)

    path, text = cache_dir / key.file_name(), key.text()

    def build() -> tuple[NDArray[np.int64], ...] | None:
        if sum(counts) > order_pieces.PIECE:
            follower = progress or Progress()
            order_pieces.fill_epoch(path, text, key.seed, key.epoch, document_lengths, num_samples, follower)
            return None
        index = build_epoch(key, document_lengths, num_samples)
        return index.document_order, index.token_offsets, index.sample_order

    values = open_numbers(path, text, build, sum(counts), progress=progress)
    documents, offsets, _ = np.cumsum(counts)
    return EpochIndex(values[:documents], values[documents:offsets], values[offsets:])
