"""Cuts a stream of shuffled documents into samples of fixed length, epoch after epoch.

    epoch e:   | doc 7 ... eod | doc 2 . eod | doc 9 ....... eod | ...     T tokens, documents in this epoch's order
    sample k:  |<- seq_length + 1 ->|                                      tokens k s .. k s + s  (s = seq_length)
                              |<- sample k + 1 ->|                         shares one token: label here, input there

    sample id i  ->  epoch i // n, place i % n, k = sample_order[place],    n = (T - 1) // s samples per epoch

Documents follow each other without padding, separated by the end-of-document token. An epoch's last tokens, fewer than s, go
unused. The stream is endless, and sample i does not depend on the run length. Document lengths come from the corpus index, so an
end-of-document token inside a text does not end a document.
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
"""Epochs kept open: around a boundary, samples from two epochs alternate."""
AHEAD = 0.9
"""Fraction of an epoch after which the next epoch's order is built."""


class Sample(NamedTuple):
    """One sample with s = seq_length labels.

    Attributes:
        tokens: token ids, int64 [s + 1].
        loss_mask: bool [s], False where the loss ignores the label.
        lengths: number of tokens that each document contributes to `tokens`, in order; they add up to s + 1.
    """

    tokens: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    lengths: tuple[int, ...]


def input_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Drop the last token, which is only a label, from a sample's document lengths."""
    *others, last = lengths
    return (*others, last - 1) if last > 1 else tuple(others)


def mask_ahead(sample: Sample, distance: int, *, within_documents: bool) -> NDArray[np.bool_]:
    """Compute the mask for predicting the token `distance` places after the next one, bool [s].

    A position is True if the loss includes every label from the next token to the predicted one. With `within_documents`, the
    predicted token must also belong to the input token's document.
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
    """A source with one fixed sample for every id >= 0."""

    def __getitem__(self, sample_id: int) -> Sample: ...
    def lengths(self, sample_id: int) -> tuple[int, ...]:
        """Return how many tokens each document contributes to a sample, without reading the tokens."""
        ...


class DocumentPart(NamedTuple):
    """Tokens `first` .. `first + length - 1` in one document."""

    document: int
    first: int
    length: int


class SampleStream:
    """The samples drawn from a contiguous range of documents in one corpus.

    Args:
        corpus: indexed tokens.
        documents: numbers of the documents to use, a range with step 1.
        seq_length: s, labels per sample.
        seed: random seed for the orders of documents and samples.
        cache_dir: folder for cached epoch orders.
        vocab_size: exclusive upper bound on token ids.
        count_document_starts: whether the loss counts a document's first token as a label.
        progress: observer notified while an epoch's order is built.

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
        """(corpus fingerprint, first document, end document, seed), which together decide an epoch's tokens."""
        return self._fingerprint, self.documents.start, self.documents.stop, self.seed

    def recut(self, seq_length: int) -> "SampleStream":
        """Cut the same token stream into samples with `seq_length` labels.

        Raises:
            DataError: the documents have fewer than seq_length + 1 tokens.
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
        """Read sample `sample_id` >= 0. Late in a long epoch, a thread begins to open the next epoch's order.

        Raises:
            DataError: a token is outside the model's vocabulary, or the index cache cannot be written.
        """
        sample = self.read(self.parts(sample_id), sample_id)
        self._open_ahead(sample_id)
        return sample

    def read(self, parts: Sequence[DocumentPart], sample_id: int, joins: Sequence[int] = ()) -> Sample:
        """Read the sample that these document parts make up.

        Args:
            parts: document parts in order, s + 1 tokens in total.
            sample_id: number of the sample, for error messages.
            joins: indices of tokens that do not follow their predecessors in the epoch; the loss ignores these labels.

        Raises:
            DataError: a token is outside the model's vocabulary.
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
            loss_mask[starts - 1] = False  # the label at start - 1 is the first token of the next document
        return Sample(tokens, loss_mask, tuple(length for _, _, length in parts))

    def lengths(self, sample_id: int) -> tuple[int, ...]:
        """Compute how many tokens each document contributes to a sample, from the index alone."""
        return tuple(length for _, _, length in self.parts(sample_id))

    def epoch_of(self, sample_id: int) -> int:
        """Return the epoch that contains a sample, from 0."""
        return sample_id // self.samples_per_epoch

    def _open_ahead(self, sample_id: int) -> None:
        """Start opening the next epoch in a thread if this sample is late in a long epoch.

        If the thread is not done in time, `epoch` waits for it. If the thread has failed, `epoch` builds the order itself, and
        raises if that fails too. The thread reports no progress, so a watchdog sees only the rank's own work.
        """
        epoch, place = divmod(sample_id, self.samples_per_epoch)
        is_long = 2 * len(self.documents) + self.samples_per_epoch > order_pieces.PIECE
        if not is_long or place < AHEAD * self.samples_per_epoch or self._opened_ahead > epoch:
            return
        self._opened_ahead = epoch + 1

        def work() -> None:
            with suppress(DataError, OSError):
                self.epoch(epoch + 1, Progress())

        # A daemon thread: a run that ends does not wait for an epoch it never reads.
        threading.Thread(target=work, name=f"order of epoch {epoch + 1}", daemon=True).start()

    def epoch(self, epoch: int, progress: Progress | None = None) -> EpochIndex:
        """Open an epoch's document and sample orders; the EPOCHS_KEPT_OPEN epochs opened last stay open.

        `progress` is notified of the building, in place of the stream's own `progress`.
        """
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
        """List the non-empty document parts that make up a sample, in order."""
        epoch, place = divmod(sample_id, self.samples_per_epoch)
        index = self.epoch(epoch)
        return self.parts_at(index, int(index.sample_order[place]) * self.seq_length, self.seq_length + 1)

    def pieces(self, sample_id: int) -> list[list[DocumentPart]]:
        """List a sample's document parts in one inner list per contiguous token range: here always one."""
        return [self.parts(sample_id)]

    def parts_at(self, index: EpochIndex, start: int, length: int) -> list[DocumentPart]:
        """List the document parts that make up tokens `start` .. `start + length - 1` in an epoch's stream, in order."""
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
