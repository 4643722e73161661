"""Random tokens in place of a corpus, for tests and for timing a layout without data (no torch here)."""

import numpy as np

from engine.data.samples import Sample
from engine.data.shuffle import random_bits
from engine.errors import DataError


class SyntheticDataset:
    """Samples as a function of (seed, i): uniform tokens, and a mask that leaves out a fraction of the labels.

    Args:
        seed: of the data.
        vocab_size: tokens are in 0 .. vocab_size - 1.
        seq_length: labels per sample.
        mask_fraction: probability that a label is masked, 0 <= mask_fraction < 1.
    """

    def __init__(self, seed: int, vocab_size: int, seq_length: int, mask_fraction: float = 0.0) -> None:
        if not 0 <= mask_fraction < 1:
            raise DataError(f"mask_fraction = {mask_fraction}: a probability below 1; without labels there is no loss.")
        self.seed, self.vocab_size, self.seq_length, self.mask_fraction = seed, vocab_size, seq_length, mask_fraction

    def __getitem__(self, sample_id: int) -> Sample:
        """Return sample `sample_id`: tokens int64 [seq_length + 1], loss_mask bool [seq_length]."""
        tokens = random_bits(self.seq_length + 1, "synthetic tokens", self.seed, sample_id) % np.uint64(self.vocab_size)
        # The top 53 bits of a draw are a double in [0, 1).
        draws = random_bits(self.seq_length, "synthetic mask", self.seed, sample_id) >> np.uint64(11)
        return Sample(tokens.astype(np.int64), draws * 2.0**-53 >= self.mask_fraction)
