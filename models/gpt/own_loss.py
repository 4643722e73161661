"""Define the base class from which an extension derives a loss of its own."""

import torch
from torch import nn

from triaxis.engine.head.vocabulary import VocabularyLogits
from triaxis.engine.linear.layers import ColumnParallelLinear
from triaxis.models.gpt.context import BuildContext
from triaxis.models.gpt.losses import logit_options


class LogitLosses(nn.Module):
    """The base class for a loss that is computed from logits.

    A subclass defines `of_logits`. If its loss needs hidden states, it overrides `forward` instead. In `forward`, `head(x)` gives
    this rank's logit columns [s, b, V_padded/t].
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.context = context

    def forward(self, x: torch.Tensor, head: ColumnParallelLinear, labels: torch.Tensor) -> torch.Tensor:
        """Compute losses [s, b], equal on every tp rank. x [s(/t), b, h] is the head's input; labels are int64 [b, s]."""
        model, axis = self.context.model, self.context.region.axis
        logits = logit_options(model).shaped(head(x))
        return self.of_logits(VocabularyLogits.of(logits, axis, model.vocab_size), labels.t())

    def of_logits(self, logits: VocabularyLogits, labels: torch.Tensor) -> torch.Tensor:
        """Compute losses [s, b], equal on every tp rank.

        `logits` holds this rank's part of the vocabulary; labels are int64 [s, b].
        """
        raise NotImplementedError(f"{type(self).__name__} gives no of_logits")
