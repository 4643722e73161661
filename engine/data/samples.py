"""Samples: fixed-length runs of tokens from a stream of shuffled documents, epoch after epoch.

    epoch e:   | doc 7 ... eod | doc 2 . eod | doc 9 ....... eod | ...     T tokens, documents in this epoch's order
    sample k:  |<- seq_length + 1 ->|                                      tokens k s .. k s + s  (s = seq_length)
                              |<- sample k + 1 ->|                         shares one token: label here, input there

    sample id i  ->  epoch i // n, place i % n, k = sample_order[place],    n = (T - 1) // s samples per epoch

Documents follow each other without padding, the end-of-document token between them. The fewer than s tokens at the end of an epoch
are not used in it; the next epoch has another order. The stream is endless, and sample i is the same whatever the length of the
run. A sample carries the lengths of its documents, from the corpus' index; an end-of-document token inside a text ends nothing.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.data import order_pieces
from triaxis.engine.data.corpus.own import Corpus
from triaxis.engine.data.epoch_index import EpochIndex, EpochKey, open_epoch
from triaxis.engine.data.index_cache import Progress
from triaxis.engine.errors import DataError

EPOCHS_KEPT_OPEN = 2
"""Open epochs: at a boundary, samples of two alternate."""
AHEAD = 0.9
"""The part of an epoch behind which the order of the next one is built."""


class Sample(NamedTuple):
    """One sample of s = seq_length labels.

    Attributes:
        tokens: int64 [s + 1].
        loss_mask: bool [s], False where a label is not counted.
        lengths: tokens of each document's part in `tokens`, in order; their sum is s + 1.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    lengths: tuple[int, ...]


def input_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of the documents in the s inputs of a sample: without its last token, which is a label only."""
    *others, last = lengths
    return (*others, last - 1) if last > 1 else tuple(others)


def mask_ahead(sample: Sample, distance: int, *, within_documents: bool) -> NDArray[np.bool_]:
    """Return which positions count for the token that is `distance` beyond the next one, bool [s].

    All labels up to that token are counted by the loss itself, and `within_documents` they are in the document of the input.
    """
    mask = np.zeros_like(sample.loss_mask)
    length = len(mask) - distance
    windows = np.lib.stride_tricks.sliding_window_view(sample.loss_mask, distance + 1)
    mask[:length] = windows.all(axis=1)
    if within_documents:
        documents = np.repeat(np.arange(len(sample.lengths)), sample.lengths)
        mask[:length] &= documents[:length] == documents[distance + 1 :]
    return mask


class SampleSource(Protocol):
    """A source of sample i for every i >= 0, always the same."""

    def __getitem__(self, sample_id: int) -> Sample: ...
    def lengths(self, sample_id: int) -> tuple[int, ...]:
        """Return `Sample.lengths` of a sample, without reading its tokens."""
        ...


class DocumentPart(NamedTuple):
    """Tokens `first` .. `first + length - 1` of one document of the corpus."""

    document: int
    first: int
    length: int


class SampleStream:
    """The samples of a contiguous range of documents of one corpus.

    Args:
        corpus: the indexed tokens.
        documents: the documents of this split, a range with step 1.
        seq_length: s, labels of a sample.
        seed: with the epoch, decides both orders.
        cache_dir: folder of the epochs' orders.
        vocab_size: upper bound of the tokens.
        count_document_starts: the loss counts a document's first token, predicted from the end of the document before it.
        progress: follows the building of an epoch's order.

    Raises:
        DataError: the documents have fewer than s + 1 tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: range,
        *,
        seq_length: int,
        seed: int,
        cache_dir: Path,
        vocab_size: int,
        count_document_starts: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.corpus, self.documents = corpus, documents
        self.seq_length, self.seed, self.cache_dir, self.vocab_size = seq_length, seed, cache_dir, vocab_size
        self.count_document_starts, self._progress = count_document_starts, progress
        self._fingerprint = corpus.fingerprint
        self._lengths = corpus.document_lengths(documents)
        self.num_tokens = int(self._lengths.sum())
        self.samples_per_epoch = (self.num_tokens - 1) // seq_length
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{corpus.prefix}: documents {documents.start:,} .. {documents.stop - 1:,} hold {self.num_tokens:,} tokens, but "
                f"one sample takes model.seq_length + 1 = {seq_length + 1:,}: this part of the split would be empty. Give it more "
                f"documents (data.split), prepare a larger corpus, or lower model.seq_length."
            )
        self._epochs: OrderedDict[int, EpochIndex] = OrderedDict()
        self._opened_ahead = 0

    @property
    def identity(self) -> tuple[str, int, int, int]:
        """Return what decides the tokens of an epoch: fingerprint of the corpus, first document, the one after the last, seed."""
        return self._fingerprint, self.documents.start, self.documents.stop, self.seed

    def recut(self, seq_length: int) -> "SampleStream":
        """Return the stream of the same tokens with samples of another length.

        Raises:
            DataError: the documents have too few tokens.
        """
        return SampleStream(
            self.corpus,
            self.documents,
            seq_length=seq_length,
            seed=self.seed,
            cache_dir=self.cache_dir,
            vocab_size=self.vocab_size,
            count_document_starts=self.count_document_starts,
            progress=self._progress,
        )

    def __getitem__(self, sample_id: int) -> Sample:
        """Return sample `sample_id` >= 0.

        Raises:
            DataError: a token is not in the model's vocabulary, or the index cache cannot be written.
        """
        sample = self.read(self.parts(sample_id), sample_id)
        self._open_ahead(sample_id)
        return sample

    def read(self, parts: Sequence[DocumentPart], sample_id: int, joins: Sequence[int] = ()) -> Sample:
        """Return the sample that is made of these parts of documents.

        Args:
            parts: s + 1 tokens, in order.
            sample_id: for messages.
            joins: places in the s + 1 tokens at which tokens begin that do not follow the ones before: no label of the loss.

        Raises:
            DataError: a token is not in the model's vocabulary.
        """
        tokens = np.concatenate([self.corpus.tokens(document, first, first + n) for document, first, n in parts])
        tokens = tokens.astype(np.int64, copy=False)
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            raise DataError(
                f"{self.corpus.prefix} holds the token ids {tokens.min()} .. {tokens.max()} in sample {sample_id}, but "
                f"model.vocab_size = {self.vocab_size}: there is no embedding for them. The corpus was prepared with "
                f"another tokenizer; set model.vocab_size to that tokenizer's size, or prepare the corpus again."
            )
        loss_mask = np.ones(len(tokens) - 1, np.bool_)
        loss_mask[np.asarray(joins, np.int64) - 1] = False
        if not self.count_document_starts:
            starts = np.cumsum([length for _, _, length in parts[:-1]], dtype=np.int64)
            loss_mask[starts - 1] = False  # the label in front of a start is the first token of another document
        return Sample(tokens, loss_mask, tuple(length for _, _, length in parts))

    def lengths(self, sample_id: int) -> tuple[int, ...]:
        """Return `Sample.lengths` of sample `sample_id` from the index alone, without its tokens."""
        return tuple(length for _, _, length in self.parts(sample_id))

    def epoch_of(self, sample_id: int) -> int:
        """Return the epoch of a sample, from 0."""
        return sample_id // self.samples_per_epoch

    def _open_ahead(self, sample_id: int) -> None:
        """Open the next epoch in a thread where a sample lies late in its own and the build would be a pause.

        The thread follows no progress, so a watch of this rank sees what the rank itself does. It has the priority of others: one
        that gets no core while it holds Python's lock would stop them. Where it fails, or is not done at the end of the epoch,
        `epoch` builds, waits for it or raises.
        """
        epoch, place = divmod(sample_id, self.samples_per_epoch)
        is_long = 2 * len(self.documents) + self.samples_per_epoch > order_pieces.PIECE
        if not is_long or place < AHEAD * self.samples_per_epoch or self._opened_ahead > epoch:
            return
        self._opened_ahead = epoch + 1

        def work() -> None:
            with suppress(DataError, OSError):
                self.epoch(epoch + 1, Progress())

        # A daemon: the end of a run does not wait for an epoch that it never reads.
        threading.Thread(target=work, name=f"order of epoch {epoch + 1}", daemon=True).start()

    def epoch(self, epoch: int, progress: Progress | None = None) -> EpochIndex:
        """Return the order of an epoch; the last ones stay open. `progress` follows the build, in place of the stream's own."""
        index = self._epochs.get(epoch)
        if index is None:
            key = EpochKey(
                self._fingerprint, self.documents.start, self.documents.stop, self.seq_length, self.seed, epoch
            )
            index = self._epochs[epoch] = open_epoch(
                self.cache_dir, key, self._lengths, self.samples_per_epoch, progress or self._progress
            )
            while len(self._epochs) > EPOCHS_KEPT_OPEN:
                self._epochs.popitem(last=False)
        return index

    def parts(self, sample_id: int) -> list[DocumentPart]:
        """List the parts of documents that make the s + 1 tokens of a sample, in order; a document without tokens has none."""
        epoch, place = divmod(sample_id, self.samples_per_epoch)
        index = self.epoch(epoch)
        return self.parts_at(index, int(index.sample_order[place]) * self.seq_length, self.seq_length + 1)

    def pieces(self, sample_id: int) -> list[list[DocumentPart]]:
        """Return `parts` as one piece: its tokens follow each other in the epoch."""
        return [self.parts(sample_id)]

    def parts_at(self, index: EpochIndex, start: int, length: int) -> list[DocumentPart]:
        """List the parts of documents that make the tokens `start` .. `start + length - 1` of an epoch's stream, in order."""
        left = length
        place = int(np.searchsorted(index.token_offsets, start, side="right")) - 1
        parts = []
        while left > 0:
            number = int(index.document_order[place])
            first = start - int(index.token_offsets[place])
            taken = min(left, int(self._lengths[number]) - first)
            if taken > 0:
                parts.append(DocumentPart(self.documents.start + number, first, taken))
            start, left, place = start + taken, left - taken, place + 1
        return parts
