"""The order of one epoch, built once per node and kept in a hashed cache file (no torch here).

    document_order  int64 [D]      documents of the split in this epoch's order
    token_offsets   int64 [D + 1]  their starts in the epoch's stream of tokens
    sample_order    int64 [n]      samples of the stream in the order of training

    file:  magic (8 bytes) | sha256 of key and arrays (32) | document_order | token_offsets | sample_order

Both orders are functions of (seed, epoch) and of the counts, never of the length of the run: a longer run extends a shorter one.
All processes of a node share the file by mmap. A truncated, damaged or foreign file does not match its hash and is built again.
"""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.data.shuffle import permutation
from engine.errors import DataError
from engine.storage.files import HASH_BLOCK_BYTES, locked, write_atomically

MAGIC = b"TRXEPOC1"
DIGEST_BYTES = 32
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpochKey:
    """The inputs of an epoch's order."""

    corpus: str
    """Fingerprint of the corpus."""
    first_document: int
    last_document: int
    seq_length: int
    seed: int
    epoch: int

    def text(self) -> str:
        return json.dumps([getattr(self, name) for name in self.__slots__])

    def file_name(self) -> str:
        return f"epoch-{self.epoch:04d}-{hashlib.sha256(self.text().encode()).hexdigest()[:20]}.index"


@dataclass(frozen=True, slots=True, eq=False)
class EpochIndex:
    """The three arrays of the picture above."""

    document_order: NDArray[np.int64]
    token_offsets: NDArray[np.int64]
    sample_order: NDArray[np.int64]


def build_epoch(key: EpochKey, document_lengths: NDArray[np.int64], num_samples: int) -> EpochIndex:
    """Return the order of one epoch from its key and the lengths of the split's documents, int64 [D]."""
    order = permutation(len(document_lengths), "documents", key.seed, key.epoch)
    offsets = np.zeros(len(order) + 1, np.int64)
    np.cumsum(document_lengths[order], out=offsets[1:])
    return EpochIndex(order, offsets, permutation(num_samples, "samples", key.seed, key.epoch))


def open_epoch(cache_dir: Path, key: EpochKey, document_lengths: NDArray[np.int64], num_samples: int) -> EpochIndex:
    """Return the epoch's order from its cache file, which the first process of a node builds while the others wait.

    Raises:
        DataError: the cache folder cannot be read or written.
    """
    path = cache_dir / key.file_name()
    counts = (len(document_lengths), len(document_lengths) + 1, num_samples)
    try:
        if (index := _load(path, key, counts)) is not None:
            return index
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / ".lock"):
            if (index := _load(path, key, counts)) is not None:
                return index
            if path.exists():
                logger.warning("index cache %s is truncated or damaged: building it again", path)
            arrays = build_epoch(key, document_lengths, num_samples)
            payload = [
                part.data.cast("B") for part in (arrays.document_order, arrays.token_offsets, arrays.sample_order)
            ]
            write_atomically(path, [MAGIC, _digest(key, payload), *payload])
    except OSError as error:
        raise DataError(
            f"the index cache {path} cannot be read or written ({error.strerror or error}). Every run needs it, once per node. Set "
            f"data.cache_dir to a folder that this user can write, with {8 * sum(counts):,} bytes free per epoch."
        ) from error
    index = _load(path, key, counts)
    if index is None:
        raise DataError(
            f"the index cache {path} does not hold what was just written to it: the disk or the file system is unreliable. "
            f"Set data.cache_dir to a folder on another one."
        )
    return index


def _digest(key: EpochKey, payload: list[memoryview]) -> bytes:
    digest = hashlib.sha256(key.text().encode())
    for part in payload:
        for start in range(0, len(part), HASH_BLOCK_BYTES):
            digest.update(part[start : start + HASH_BLOCK_BYTES])
    return digest.digest()


def _load(path: Path, key: EpochKey, counts: tuple[int, int, int]) -> EpochIndex | None:
    """Return the arrays of a cache file, or None if it is missing or does not match its key."""
    start = len(MAGIC) + DIGEST_BYTES
    try:
        if path.stat().st_size != start + 8 * sum(counts):
            return None
        content = np.memmap(path, dtype=np.uint8, mode="r")
    except (FileNotFoundError, NotADirectoryError):
        return None
    head = content[:start].tobytes()
    if head != MAGIC + _digest(key, [content[start:].data]):
        return None
    documents, offsets, _ = np.cumsum(counts)
    values = content[start:].view("<i8")
    return EpochIndex(values[:documents], values[documents:offsets], values[offsets:])
