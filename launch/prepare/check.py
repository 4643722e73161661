"""Check a corpus against the hashes in its record and the ids of its tokenizer."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triaxis.engine.data.corpus.indexed import IndexedTokens, bin_path, idx_path
from triaxis.engine.data.corpus.record import CorpusRecord
from triaxis.engine.storage.files import sha256_of_file

ENDS_KEPT = 3


@dataclass(frozen=True, slots=True)
class CorpusCheck:
    """The results of reading every byte of a corpus.

    Attributes:
        version: two lists, for the .bin and the .idx: device, inode, size, mtime and ctime (times in nanoseconds).
        bin_sha256, idx_sha256: file hashes, hexadecimal.
        smallest_id, largest_id: smallest and largest token id.
        ends: the ENDS_KEPT most frequent last tokens of non-empty documents, as [id, number of documents].
    """

    version: list[list[int]]
    bin_sha256: str
    idx_sha256: str
    smallest_id: int
    largest_id: int
    ends: list[list[int]]

    def problems(
        self, prefix: str, record: CorpusRecord | None, vocab_size: int | None, eod_id: int | None
    ) -> list[str]:
        """List where the corpus contradicts its record, the vocabulary or the end-of-document id.

        Args:
            record: the corpus's record; None: it has none.
            vocab_size: tokenizer's vocabulary size; None: no tokenizer is known.
            eod_id: id that must be the documents' most frequent last token; None: unknown, or the corpus was prepared without one.
        """
        found = []
        if eod_id not in (None, self.ends[0][0]):
            found.append(
                f"{prefix}: most documents do NOT end with the tokenizer's end of a document, id {eod_id}, so each runs into the "
                "next one. Prepare the corpus again, or name the tokenizer and the token that made it (--tokenizer, --eod-token)."
            )
        if record is not None:
            for path, own, recorded in (
                (bin_path(prefix), self.bin_sha256, record.bin_sha256),
                (idx_path(prefix), self.idx_sha256, record.idx_sha256),
            ):
                if own != recorded:
                    found.append(
                        f"{path} is not what was written: sha256 {own[:16]}.., and its record has {recorded[:16]}... Its tokens "
                        "are damaged or of another corpus. Copy both files again, or prepare the corpus again."
                    )
        if self.smallest_id < 0 or (vocab_size is not None and self.largest_id >= vocab_size):
            known = "" if vocab_size is None else f", and the tokenizer has those from 0 to {vocab_size - 1:,}"
            found.append(
                f"{prefix} has ids from {self.smallest_id:,} to {self.largest_id:,}{known}: a run would stop where it reads one "
                "without an embedding. Prepare the corpus again, or name the tokenizer that made it (--tokenizer)."
            )
        return found


def check(corpus: IndexedTokens) -> CorpusCheck:
    """Read every byte in a corpus."""
    digest, smallest, largest = hashlib.sha256(), [], []
    for block in corpus.blocks():
        digest.update(block.data.cast("B"))
        smallest.append(int(block.min()))
        largest.append(int(block.max()))
    index = idx_path(corpus.prefix)
    version = [_version(path) for path in (bin_path(corpus.prefix), index)]
    return CorpusCheck(version, digest.hexdigest(), sha256_of_file(index), min(smallest), max(largest), _ends(corpus))


def _ends(corpus: IndexedTokens) -> list[list[int]]:
    last = corpus.last_tokens(np.arange(corpus.num_documents))
    lengths = corpus.document_lengths(range(corpus.num_documents))
    ids, counts = np.unique(last[lengths > 0], return_counts=True)
    most = np.argsort(-counts, kind="stable")[:ENDS_KEPT]
    return [[int(ids[each]), int(counts[each])] for each in most]


def _version(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
