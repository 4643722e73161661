"""Provides sums and look-ups over logits whose vocabulary is cut over tp.

Each result [s, b] is equal on every tp rank, and every rank must apply the same operations to it. Then no backward needs
communication.
"""

from dataclasses import dataclass

import torch

from triaxis.engine.activations.linear_map import mapped
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.numerics.precision import accumulate

PURPOSE = "loss of an extension"


@dataclass(frozen=True, slots=True)
class VocabularyLogits:
    """The logits of [s, b] tokens for this rank's part of the vocabulary.

    Attributes:
        columns: this rank's columns without vocabulary padding, [s, b, v] in the accumulation dtype; v may be 0.
        axis: tp axis.
        first: token id for the first column.
        vocab_size: vocabulary size V, over all ranks.
    """

    columns: torch.Tensor
    axis: Axis
    first: int
    vocab_size: int

    @classmethod
    def of(cls, logits: torch.Tensor, axis: Axis, vocab_size: int) -> "VocabularyLogits":
        """Wrap this rank's logits, [s, b, V_padded/t]."""
        first = axis.index * logits.shape[-1]
        return cls(accumulate(logits[..., : max(vocab_size - first, 0)]), axis, first, vocab_size)

    def sum(self, columns: torch.Tensor) -> torch.Tensor:
        """Sum `columns` [s, b, v] over the vocabulary of all tp ranks -> [s, b]."""
        # Each rank's gradient is already that of the whole sum.
        return mapped(
            columns.sum(-1), lambda part: self.axis.all_reduce(part.clone(), PURPOSE).wait(), lambda grad: grad
        )

    def max(self) -> torch.Tensor:
        """Find each token's largest logit, [s, b], without a gradient."""
        columns = self.columns.detach()
        if columns.shape[-1]:
            largest = columns.amax(-1)
        else:
            largest = columns.new_full(columns.shape[:-1], torch.finfo(columns.dtype).min)
        return self.axis.all_reduce(largest, PURPOSE, op="max").wait()

    def log_sum_exp(self) -> torch.Tensor:
        """Compute log(sum_v exp(z_v)) per token, [s, b]."""
        largest = self.max()
        return self.sum((self.columns - largest.unsqueeze(-1)).exp()).log() + largest

    def at(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up each token's logit for the vocabulary id in `ids`, int64 [s, b] -> [s, b]."""
        local = ids - self.first
        held = (local >= 0) & (local < self.columns.shape[-1])
        if not self.columns.shape[-1]:
            return self.sum(self.columns)
        found = self.columns.gather(-1, local.where(held, 0).unsqueeze(-1))
        return self.sum(found * held.unsqueeze(-1))

    def cross_entropy(self, labels: torch.Tensor) -> torch.Tensor:
        """Compute -log softmax(z)_label per token, [s, b]; labels int64 [s, b]."""
        return self.log_sum_exp() - self.at(labels)
