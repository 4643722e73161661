"""Reads and writes tokens on disk in Megatron's `.bin/.idx` format, version 1.

    PREFIX.bin   token token token ...                        one dtype, little endian, sequences one after another
    PREFIX.idx   "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | num_sequences S u64 | num_document_indices D + 1 u64
                 | sequence_lengths   int32 [S]      tokens of each sequence
                 | sequence_pointers  int64 [S]      byte offset of each sequence in PREFIX.bin
                 | document_indices   int64 [D + 1]  number of each document's first sequence, then S

Document d consists of sequences document_indices[d] to document_indices[d + 1] - 1. The `.idx` is renamed into place after the
`.bin`, so a pair with an `.idx` is complete. Files from Megatron-LM, NeMo and gpt-neox are read unchanged, and these programs read
ours. The whole index is checked at opening.
"""

import hashlib
import os
import re
import shlex
import struct
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from triaxis.engine.errors import DataError
from triaxis.engine.program import triaxis
from triaxis.engine.storage.elsewhere import how_to_get
from triaxis.engine.storage.files import HASH_BLOCK_BYTES, sync, sync_folder

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Megatron's codes for numpy dtypes; 6 and 7 (floats) are never tokens."""
LONGEST_SEQUENCE = 2**31 - 1
"""Longest sequence in tokens: the format stores sequence lengths as int32."""
CHECK_BLOCK_SEQUENCES = 2**20
CHECK_BLOCK_TOKENS = 2**22
PREFIXES_SHOWN = 4
FINGERPRINT_SAMPLES = 64
FINGERPRINT_SAMPLE_BYTES = 4096

Tokens = NDArray[np.integer[Any]]


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def _prefixes_near(name: str) -> list[str]:
    """List existing corpora that a wrong name may mean.

    The candidates are the name without its ending or `/`, and all corpora in the folder `name`.
    """
    stem = re.sub(r"(\.bin|\.idx|\.json)?/*$", "", name)
    below = sorted(str(path.with_suffix("")) for path in Path(name).glob("*.idx")) if Path(name).is_dir() else []
    return [each for each in (stem, *below) if each != name and bin_path(each).is_file() and idx_path(each).is_file()]


def smallest_dtype(vocab_size: int) -> np.dtype[Any]:
    """Choose uint16 for fewer than 65,500 ids, else int32, as Megatron's tools do."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


class IndexedTokens:
    """The documents in one `.bin/.idx` pair, memory-mapped.

    Args:
        prefix: common path of the two files, without the ending.
        tokenizer: tokenizer name to suggest in the error for a missing pair.

    Raises:
        DataError: a file is missing, truncated or in another format, or the two do not belong together.
    """

    def __init__(self, prefix: str | Path, tokenizer: str = "bytes") -> None:
        self.prefix = str(prefix)
        self._bin_path, self._idx_path = bin_path(prefix), idx_path(prefix)
        for path in (self._idx_path, self._bin_path):
            if not path.is_file():
                found = _prefixes_near(self.prefix)
                if found and not self._bin_path.is_file():
                    raise DataError(
                        f"{prefix} is not a corpus path: {path} does not exist. A corpus is a pair of files, named by their path "
                        f"without the ending: give {' or '.join(found[:PREFIXES_SHOWN])}"
                    )
                raise DataError(
                    f"{path} does not exist. A corpus is a pair of files, {self._bin_path.name} and {self._idx_path.name}; "
                    f"data.train names their path without the ending. Prepare one:  "
                    + triaxis(
                        f"prepare --input 'TEXT/*.txt' --tokenizer {shlex.quote(tokenizer)} --output {shlex.quote(self.prefix)}"
                    )
                )
        self._read_index()
        self._check_pointers()
        self._tokens = np.memmap(self._bin_path, dtype=self.dtype, mode="r")

    def _read_index(self) -> None:
        size = self._idx_path.stat().st_size
        with self._idx_path.open("rb") as handle:
            head = handle.read(HEADER.size)
        if head[: len(MAGIC)] != MAGIC[: len(head)]:
            _refuse_pointer(self._idx_path)
            raise DataError(
                f"{self._idx_path} begins with {head[: len(MAGIC)]!r}, not with {MAGIC!r}: it is no index of Megatron's format, "
                f"version {VERSION}. Give the path of a .bin/.idx pair without its ending, or prepare the corpus again."
            )
        if len(head) < HEADER.size:
            raise self._damaged(self._idx_path, f"at least {HEADER.size} bytes", size)
        _, version, code, num_sequences, num_indices = HEADER.unpack(head)
        if version != VERSION:
            raise DataError(
                f"{self._idx_path} has version {version}; only version {VERSION} of the format is known, and another one would "
                f"be read as noise. Prepare the corpus again with current tools."
            )
        if code not in DTYPE_CODES or DTYPE_CODES[code][-2] == "f":
            raise DataError(
                f"{self._idx_path} has dtype code {code}, which is not an integer type: tokens have the codes "
                f"{', '.join(str(known) for known in DTYPE_CODES if DTYPE_CODES[known][-2] != 'f')}. The file is damaged or "
                f"does not hold tokens; prepare the corpus again."
            )
        expected = HEADER.size + 12 * num_sequences + 8 * num_indices
        if size != expected:
            raise self._damaged(
                self._idx_path, f"{expected:,} bytes for {num_sequences:,} sequences and {num_indices:,} indices", size
            )
        self.dtype: np.dtype[Any] = np.dtype(DTYPE_CODES[code])
        index = np.memmap(self._idx_path, dtype=np.uint8, mode="r")
        lengths_end = HEADER.size + 4 * num_sequences
        pointers_end = lengths_end + 8 * num_sequences
        self._lengths = index[HEADER.size : lengths_end].view("<i4")
        self._pointers = index[lengths_end:pointers_end].view("<i8")
        self._documents = index[pointers_end:].view("<i8")

    def _check_pointers(self) -> None:
        """Check that sequences lie inside the `.bin` and reach its end. Documents must be consecutive runs of sequences."""
        size = self._bin_path.stat().st_size
        end = 0
        for start in range(0, len(self._lengths), CHECK_BLOCK_SEQUENCES):
            lengths = self._lengths[start : start + CHECK_BLOCK_SEQUENCES].astype(np.int64)
            pointers = self._pointers[start : start + CHECK_BLOCK_SEQUENCES]
            ends = pointers + lengths * self.dtype.itemsize
            # A pointer near 2^63 makes `ends` wrap below 0, so the pointer itself is compared too.
            wrong = (lengths < 0) | (pointers < 0) | (pointers > size) | (ends > size)
            wrong |= pointers % self.dtype.itemsize != 0
            if wrong.any():
                at = int(np.argmax(wrong))
                raise DataError(
                    f"{self._idx_path}: sequence {start + at:,} claims {lengths[at]:,} tokens of {self.dtype} at byte "
                    f"{pointers[at]:,}, but {self._bin_path.name} has {size:,} bytes: its tokens would be noise. One of the "
                    f"two is truncated, damaged or of another corpus. Copy both again, or prepare the corpus again."
                )
            end = max(end, int(ends.max()))
        if end != size or end == 0:
            raise self._damaged(
                self._bin_path, f"{end:,} bytes, as {self._idx_path.name} describes, and some tokens", size
            )
        bounds = self._documents
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != len(self._lengths) or np.any(bounds[1:] < bounds[:-1]):
            raise DataError(
                f"{self._idx_path}: the document indices are not a rising list from 0 to {len(self._lengths):,} (the number "
                f"of sequences), so documents would overlap or be lost. The file is damaged: prepare the corpus again."
            )

    def _damaged(self, path: Path, expected: str, found: int) -> DataError:
        _refuse_pointer(path)
        return DataError(
            f"{path} has {found:,} bytes; expected {expected}. It is truncated, damaged or not of the same corpus as its "
            f"partner. Copy the pair again, or prepare the corpus again."
        )

    @property
    def cache_dir(self) -> Path:
        """Folder for cached sample orders, unless the configuration names another folder."""
        return Path(f"{self.prefix}.cache")

    @property
    def num_sequences(self) -> int:
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    @property
    def num_tokens(self) -> int:
        return int(self._lengths.sum(dtype=np.int64))

    def sequence(self, index: int) -> Tokens:
        """Return a sequence's tokens, `dtype` [length], as a view into the file."""
        start = int(self._pointers[index]) // self.dtype.itemsize
        return self._tokens[start : start + int(self._lengths[index])]

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> Tokens:
        """Read a document's tokens `start` to `stop` - 1, `dtype` [n]. n is smaller if the document ends earlier."""
        parts = []
        at = 0
        for index in range(int(self._documents[document]), int(self._documents[document + 1])):
            length = int(self._lengths[index])
            if at + length > start and (stop is None or at < stop):
                part = self.sequence(index)
                parts.append(part[max(0, start - at) : None if stop is None else stop - at])
            at += length
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)

    def document_lengths(self, documents: range) -> NDArray[np.int64]:
        """Compute document lengths in tokens for a contiguous range, int64 [len(documents)]."""
        bounds = self._documents[documents.start : documents.stop + 1]
        ends = np.concatenate([[0], np.cumsum(self._lengths[bounds[0] : bounds[-1]], dtype=np.int64)])
        return np.diff(ends[bounds - bounds[0]])

    def encoded(self, documents: range) -> tuple[Iterator[bytes], NDArray[np.int32], NDArray[np.int64]]:
        """Return (token bytes, sequence lengths, document ends) of documents, for `IndexedWriter.add_encoded`."""
        first, last = int(self._documents[documents.start]), int(self._documents[documents.stop])
        ends = self._documents[documents.start + 1 : documents.stop + 1] - first
        return self._blocks(first, last), self._lengths[first:last], ends

    def _blocks(self, first: int, last: int) -> Iterator[bytes]:
        """Yield the bytes of sequences `first` to `last` - 1. Sequences that adjoin in the file are read together."""
        pointers = self._pointers[first:last]
        stops = pointers + self._lengths[first:last].astype(np.int64) * self.dtype.itemsize
        breaks = (np.flatnonzero(pointers[1:] != stops[:-1]) + 1).tolist()
        with self._bin_path.open("rb") as handle:
            for begin, end in pairwise([0, *breaks, last - first]):
                handle.seek(int(pointers[begin]))
                left = int(stops[end - 1]) - int(pointers[begin])
                while left:
                    block = handle.read(min(left, HASH_BLOCK_BYTES))
                    if not block:
                        raise self._damaged(
                            self._bin_path, "as many as when it was opened", os.fstat(handle.fileno()).st_size
                        )
                    left -= len(block)
                    yield block

    def last_tokens(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Read each document's last token, int64 [len(documents)]. An empty document gives -1."""
        last = self._documents[documents + 1] - 1
        found = np.full(len(documents), -1, np.int64)
        # Sequences may be empty, so a document ends with its last non-empty sequence.
        while (empty := (last >= self._documents[documents]) & (self._lengths[last] == 0)).any():
            last = last - empty
        filled = last >= self._documents[documents]
        found[filled] = self._tokens[
            self._pointers[last[filled]] // self.dtype.itemsize + self._lengths[last[filled]] - 1
        ]
        return found

    def ids(self, most_tokens: int) -> tuple[int, int]:
        """Find the smallest and the largest id in evenly spaced ranges of about `most_tokens` tokens together."""
        length = -(-most_tokens // FINGERPRINT_SAMPLES)
        starts = np.linspace(0, max(0, len(self._tokens) - length), FINGERPRINT_SAMPLES, dtype=np.int64)
        found = [self._tokens[start : start + length] for start in starts]
        return min(int(each.min()) for each in found), max(int(each.max()) for each in found)

    def blocks(self) -> Iterator[Tokens]:
        """Yield all tokens in file order, as views `dtype` [n] into the file."""
        for start in range(0, len(self._tokens), CHECK_BLOCK_TOKENS):
            yield self._tokens[start : start + CHECK_BLOCK_TOKENS]

    @property
    def identity(self) -> tuple[int, int]:
        """(device, inode) of the `.bin`, equal on a node for all names of one corpus."""
        status = self._bin_path.stat()
        return status.st_dev, status.st_ino

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal sha256 over the whole index, the .bin's size and samples from its bytes.

        Corpora that differ only outside the sampled bytes have the same fingerprint.
        """
        digest = hashlib.sha256()
        with self._idx_path.open("rb") as handle:
            while block := handle.read(HASH_BLOCK_BYTES):
                digest.update(block)
        size = self._bin_path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with self._bin_path.open("rb") as handle:
            for sample in range(FINGERPRINT_SAMPLES):
                handle.seek(max(0, size - FINGERPRINT_SAMPLE_BYTES) * sample // (FINGERPRINT_SAMPLES - 1))
                digest.update(handle.read(FINGERPRINT_SAMPLE_BYTES))
        return digest.hexdigest()


def _refuse_pointer(path: Path) -> None:
    """Raise DataError if a file is a placeholder, such as a Git LFS pointer. Call this only for files already found invalid."""
    if how := how_to_get(path):
        raise DataError(f"{path} is not there yet: its tokens would be noise.{how}")


class IndexedWriter:
    """A context manager that writes one `.bin/.idx` pair, complete or not at all.

    An exception inside the `with` block removes the partial files. An older pair stays until the new pair is complete. The old
    `.idx` is removed first, so an old index never describes a new `.bin`.

    Args:
        prefix: common path of the two files, without the ending, in an existing folder.
        dtype: integer dtype from `DTYPE_CODES`; see `smallest_dtype`.

    Raises:
        DataError: the format has no such dtype.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        codes = {np.dtype(name): code for code, name in DTYPE_CODES.items()}
        if self.dtype.kind not in "iu" or self.dtype not in codes:
            raise DataError(
                f"tokens cannot be written as {self.dtype}: the format has {', '.join(str(d) for d in codes if d.kind in 'iu')}."
            )
        self._code = codes[self.dtype]
        self._lengths = array("i")
        self._document_ends = array("q", [0])
        self._num_bytes = 0
        self._sha256 = hashlib.sha256()

    def __enter__(self) -> Self:
        self._partial_bin = Path(f"{self.prefix}.bin.partial")
        self._partial_idx = Path(f"{self.prefix}.idx.partial")
        self._handle = self._partial_bin.open("wb")
        return self

    def add_document(self, tokens: ArrayLike) -> None:
        """Append one document.

        Raises:
            DataError: a token does not fit the dtype, or the document has more than 2^31 - 1 tokens.
        """
        values = np.asarray(tokens)
        limits = np.iinfo(self.dtype)
        if values.size and (values.min() < limits.min or values.max() > limits.max):
            raise DataError(
                f"document {len(self._lengths):,} has a token id outside {limits.min} .. {limits.max}, the range of {self.dtype}; "
                f"it would wrap around to another id. Use a dtype that holds the whole vocabulary."
            )
        if values.size > LONGEST_SEQUENCE:
            raise DataError(
                f"a document of {values.size:,} tokens does not fit: the format counts tokens of a sequence in int32, at most "
                f"{LONGEST_SEQUENCE:,}. Split the document."
            )
        self.add_encoded([values.astype(self.dtype).tobytes()], np.array([values.size]))

    def add_encoded(
        self, blocks: Iterable[bytes], lengths: NDArray[np.integer[Any]], document_ends: NDArray[np.int64] | None = None
    ) -> None:
        """Append sequences whose tokens are already in `dtype`.

        Args:
            blocks: the sequences' bytes in order, cut anywhere.
            lengths: tokens per sequence, [sequences], each at most LONGEST_SEQUENCE.
            document_ends: number of added sequences up to each document's end, [documents], rising; None: each sequence is a
                document.
        """
        first = len(self._lengths)
        for block in blocks:
            self._handle.write(block)
            self._sha256.update(block)
            self._num_bytes += len(block)
        self._lengths.frombytes(lengths.astype("<i4").tobytes())
        ends = np.arange(1, len(lengths) + 1) if document_ends is None else document_ends
        self._document_ends.frombytes((ends + first).astype("<i8").tobytes())

    @property
    def bin_sha256(self) -> str:
        """Hexadecimal sha256 over the `.bin` as written so far."""
        return self._sha256.hexdigest()

    def _write_index(self) -> None:
        lengths = np.asarray(self._lengths, "<i4")
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        assert self._num_bytes == (int(ends[-1]) if len(ends) else 0), "the lengths are those of the tokens"
        with self._partial_idx.open("wb") as handle:
            handle.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._document_ends)))
            handle.write(lengths.tobytes())
            handle.write((ends - lengths.astype(np.int64) * self.dtype.itemsize).astype("<i8").tobytes())
            handle.write(self._document_ends.tobytes())
            handle.flush()
            sync(handle.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._handle:
                if error is None:
                    self._handle.flush()
                    sync(self._handle.fileno())
            if error is None:
                self._write_index()
                idx_path(self.prefix).unlink(missing_ok=True)
                self._partial_bin.replace(bin_path(self.prefix))
                self._partial_idx.replace(idx_path(self.prefix))
                sync_folder(bin_path(self.prefix).parent)
        finally:
            self._partial_bin.unlink(missing_ok=True)
            self._partial_idx.unlink(missing_ok=True)
