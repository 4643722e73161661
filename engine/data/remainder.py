"""Cuts an epoch's unread tokens into new samples after a run changes its sample length.

    epoch, cut by 4     |0 . . .|1 . . .|2 . . .|3 . . .|4 . . .|     samples 3 and 0 were read, but not 1, 2 and 4
    unread pieces               |1 . . . 2 . . . x|     |4 . . . x|     x is a piece's last label, not an input
    cut by 6                    |- - - - - - -|- - - - - -            in a new order, with fewer than 6 tokens left over

A run reads samples in random order, so the unread samples are scattered over the epoch. They form a new stream in epoch order, and
adjacent samples form one piece. Each piece begins a new document. A piece's first token is not a label, since an earlier sample has
already predicted it. So each label in the epoch is predicted once, except those left over at the end.

A remainder may be cut again. No checkpoint stores a remainder, since the number of samples read determines it.
"""

import json

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.data.index_cache import key_digest, open_numbers
from triaxis.engine.data.samples import DocumentPart, Sample, SampleStream
from triaxis.engine.data.shuffle import permutation


class WholeEpoch:
    """A whole epoch cut into samples: one piece from position 0, without earlier cuts. Attributes are those of a `Remainder`."""

    history: tuple[tuple[int, int], ...] = ()

    def __init__(self, stream: SampleStream, epoch: int) -> None:
        self._stream, self._epoch = stream, epoch
        self.seq_length = stream.seq_length
        self.starts, self.offsets = np.zeros(1, np.int64), np.array([0, stream.num_tokens])

    @property
    def order(self) -> NDArray[np.int64]:
        return self._stream.epoch(self._epoch).sample_order


class Remainder:
    """The samples left in an epoch after some were read, cut to a new length.

    Args:
        stream: corpus stream with the new sample length.
        epoch: epoch number, from 0.
        before: the epoch, or its earlier remainder, cut to the old length; some of its samples were read.
        read: number of samples read from `before`, in training order.

    Attributes:
        starts: position in the epoch's stream of the first token of each piece, a contiguous token range; int64 [R] for R pieces.
        offsets: each piece's start after the pieces are concatenated, then the total length, int64 [R + 1], in tokens.
        seq_length: labels per sample.
        order: samples in training order, int64 [n].
        history: (seq_length, samples read) for each earlier cut.

    Raises:
        DataError: the cache folder cannot be read or written.
    """

    def __init__(self, stream: SampleStream, epoch: int, before: "WholeEpoch | Remainder", read: int) -> None:
        self._stream, self._epoch, self._before, self._read = stream, epoch, before, read
        self.seq_length = stream.seq_length
        self.history: tuple[tuple[int, int], ...] = (*before.history, (before.seq_length, read))
        key = json.dumps(["remainder", *stream.identity, epoch, self.history, self.seq_length])
        path = stream.cache_dir / f"remainder-{epoch:04d}-{key_digest(key)}.index"
        numbers = open_numbers(path, key, self._build, None, ".remainder.lock")
        num_pieces = int(numbers[0])
        self.starts, lengths, self.order = np.split(numbers[1:], [num_pieces, 2 * num_pieces])
        self.offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def __len__(self) -> int:
        return len(self.order)

    def recut(self, stream: SampleStream, read: int) -> "Remainder":
        """Return this remainder without its first `read` samples, cut to `stream.seq_length` labels per sample."""
        if read == 0:
            return Remainder(stream, self._epoch, self._before, self._read)
        return Remainder(stream, self._epoch, self, read)

    def _build(self) -> tuple[NDArray[np.int64], ...]:
        starts, lengths = unread_pieces(self._before, self._read)
        num_samples = max(0, (int(lengths.sum()) - 1) // self.seq_length)
        cuts = [number for cut in self.history for number in cut]
        order = permutation(num_samples, "remainder", self._stream.seed, self._epoch, *cuts, self.seq_length)
        return np.array([len(starts)]), starts, lengths, order

    def read(self, sample_id: int) -> Sample:
        """Read a sample. The loss ignores the first token of each piece (see the module).

        A sample that the run read before this cut has already predicted that token.
        """
        pieces = self.pieces(sample_id)
        joins = np.cumsum([sum(part.length for part in piece) for piece in pieces[:-1]], dtype=np.int64)
        return self._stream.read([part for piece in pieces for part in piece], sample_id, joins.tolist())

    def pieces(self, sample_id: int) -> list[list[DocumentPart]]:
        """List the document parts that make up a sample, in order, with one inner list per piece.

        A piece is a contiguous token range of the epoch that the run had not read before this cut. A sample may take tokens from
        several pieces.
        """
        index = self._stream.epoch(self._epoch)
        start, left = int(self.order[sample_id]) * self.seq_length, self.seq_length + 1
        number = int(np.searchsorted(self.offsets, start, side="right")) - 1
        pieces = []
        while left > 0:
            inside = start - int(self.offsets[number])
            length = min(left, int(self.offsets[number + 1]) - start)
            pieces.append(self._stream.parts_at(index, int(self.starts[number]) + inside, length))
            start, left, number = start + length, left - length, number + 1
        return pieces


def unread_pieces(cut: WholeEpoch | Remainder, read: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the epoch's token ranges that stay unread after the first `read` samples of `cut.order`.

    A `Cut` is an epoch, or its unread rest, as samples. A range ends with the last label in its last sample.

    Returns:
        Each range's first position in the epoch and each range's length in tokens, int64 [R] each, in epoch order.
    """
    windows = np.sort(cut.order[read:])
    is_first = np.diff(windows, prepend=-2) != 1
    is_last = np.append(is_first[1:], True)
    begins, ends = windows[is_first] * cut.seq_length, (windows[is_last] + 1) * cut.seq_length + 1
    # A range of windows may span several pieces in this cut.
    first = np.searchsorted(cut.offsets, begins, side="right") - 1
    last = np.searchsorted(cut.offsets, ends - 1, side="right") - 1
    spans = last - first + 1
    which = np.repeat(np.arange(len(begins)), spans)
    piece = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans) + first[which]
    begin = np.maximum(begins[which], cut.offsets[piece])
    end = np.minimum(ends[which], cut.offsets[piece + 1])
    return cut.starts[piece] + begin - cut.offsets[piece], end - begin


class ContinuedStream:
    """A corpus's unread samples, first from an epoch's remainder, then from whole epochs.

    Args:
        stream: stream for the whole epochs.
        first: id within `stream` of the sample that follows the remainder.
        remainder: rest of an epoch that was begun with another sample length; None if nothing is left.
        read: samples already read from the remainder.
    """

    def __init__(self, stream: SampleStream, first: int = 0, remainder: Remainder | None = None, read: int = 0) -> None:
        self.stream, self.first, self.remainder, self.read = stream, first, remainder, read
        self.corpus = stream.corpus
        self._left = 0 if remainder is None else len(remainder) - read

    def after(self, count: int, seq_length: int) -> "ContinuedStream":
        """Return the samples after this stream's first `count` samples, cut to `seq_length` labels.

        Raises:
            DataError: the corpus has too few tokens for one sample, or the index cache cannot be written.
        """
        stream = self.stream if seq_length == self.stream.seq_length else self.stream.recut(seq_length)
        if count < self._left:
            assert self.remainder is not None, "something is left of it"
            read = self.read + count
            if stream is self.stream:
                return ContinuedStream(stream, self.first, self.remainder, read)
            epoch = self.stream.epoch_of(self.first)
            return ContinuedStream(stream, epoch * stream.samples_per_epoch, self.remainder.recut(stream, read))
        first = self.first + count - self._left
        if stream is self.stream:
            return ContinuedStream(stream, first)
        epoch, place = divmod(first, self.stream.samples_per_epoch)
        if place == 0:
            return ContinuedStream(stream, epoch * stream.samples_per_epoch)
        remainder = Remainder(stream, epoch, WholeEpoch(self.stream, epoch), place)
        return ContinuedStream(stream, (epoch + 1) * stream.samples_per_epoch, remainder)

    def epoch_of(self, sample_id: int) -> int:
        """Return the epoch that contains a sample, from 0."""
        if sample_id < self._left:
            return self.stream.epoch_of(self.first) - 1
        return self.stream.epoch_of(self.first + sample_id - self._left)

    def pieces(self, sample_id: int) -> list[list[DocumentPart]]:
        """List a sample's document parts in order, with one inner list per contiguous token range."""
        if self.remainder is not None and sample_id < self._left:
            return self.remainder.pieces(self.read + sample_id)
        return self.stream.pieces(self.first + sample_id - self._left)

    def __getitem__(self, sample_id: int) -> Sample:
        if self.remainder is not None and sample_id < self._left:
            return self.remainder.read(self.read + sample_id)
        return self.stream[self.first + sample_id - self._left]

    def lengths(self, sample_id: int) -> tuple[int, ...]:
        """Compute how many tokens each document contributes to a sample, without reading the tokens."""
        return tuple(length for piece in self.pieces(sample_id) for _, _, length in piece)
