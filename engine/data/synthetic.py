"""Draws random tokens instead of a corpus, for tests and for timing a layout."""

import numpy as np
from numpy.typing import NDArray

from triaxis.engine.data.samples import Sample
from triaxis.engine.data.shuffle import random_bits
from triaxis.engine.errors import DataError


class SyntheticDataset:
    """Random samples that depend only on the seed and the sample id.

    Tokens are uniform, and a mask hides a fraction of the labels. After each token, a document ends with probability 1 /
    mean_document_length.

    Args:
        seed: random seed.
        vocab_size: exclusive upper bound on token ids.
        seq_length: labels per sample.
        mask_fraction: probability that a label is masked, 0 <= mask_fraction < 1.
        mean_document_length: mean tokens per document, at least 1; None makes each sample one document.
        count_document_starts: whether the loss counts each document's first token (`data.count_document_starts`).

    Raises:
        DataError: mask_fraction is not in [0, 1).
    """

    def __init__(
        self,
        seed: int,
        vocab_size: int,
        seq_length: int,
        mask_fraction: float = 0.0,
        *,
        mean_document_length: int | None = None,
        count_document_starts: bool = True,
    ) -> None:
        if not 0 <= mask_fraction < 1:
            raise DataError(
                f"mask_fraction = {mask_fraction}: must be at least 0 and below 1, or no label is left for the loss."
            )
        self.seed, self.vocab_size, self.seq_length, self.mask_fraction = seed, vocab_size, seq_length, mask_fraction
        self.mean_document_length, self.count_document_starts = mean_document_length, count_document_starts

    def __getitem__(self, sample_id: int) -> Sample:
        """Draw tokens int64 [seq_length + 1] and loss_mask bool [seq_length] for a sample."""
        tokens = random_bits(self.seq_length + 1, "synthetic tokens", self.seed, sample_id) % np.uint64(self.vocab_size)
        counted = self._draws("synthetic mask", sample_id) >= self.mask_fraction
        lengths = self.lengths(sample_id)
        if not self.count_document_starts:
            counted[np.cumsum(lengths[:-1], dtype=np.int64) - 1] = False
        return Sample(tokens.astype(np.int64), counted, lengths)

    def lengths(self, sample_id: int) -> tuple[int, ...]:
        """Draw a sample's document lengths, which add up to seq_length + 1."""
        if self.mean_document_length is None:
            return (self.seq_length + 1,)
        ends = np.flatnonzero(self._draws("synthetic documents", sample_id) < 1 / self.mean_document_length) + 1
        return tuple(np.diff(ends, prepend=0, append=self.seq_length + 1).tolist())

    def _draws(self, purpose: str, sample_id: int) -> NDArray[np.float64]:
        """Draw uniform numbers in [0, 1), float64 [seq_length], with 53 random bits each."""
        bits = random_bits(self.seq_length, purpose, self.seed, sample_id) >> np.uint64(11)
        return bits.astype(np.float64) * 2.0**-53
