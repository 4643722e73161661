"""Define the base class from which an extension derives a loss of its own."""

import torch
from torch import nn

from triaxis.engine.head.vocabulary import VocabularyLogits
from triaxis.engine.linear.layers import ColumnParallelLinear
from triaxis.models.gpt.context import BuildContext
from triaxis.models.gpt.losses import logit_options


class LogitLosses(nn.Module):
    """A loss that reads logits; subclasses implement `of_logits`.

    A loss that reads hidden states overrides `forward` instead; there, `head(x)` computes this rank's logit columns,
    [s, b, V_padded/t].
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.context = context

    def forward(self, x: torch.Tensor, head: ColumnParallelLinear, labels: torch.Tensor) -> torch.Tensor:
        """Compute losses [s, b], equal on every tp rank, from the head's input x [s(/t), b, h] and int64 labels [b, s]."""
        model, axis = self.context.model, self.context.region.axis
        logits = logit_options(model).shaped(head(x))
        return self.of_logits(VocabularyLogits.of(logits, axis, model.vocab_size), labels.t())

    def of_logits(self, logits: VocabularyLogits, labels: torch.Tensor) -> torch.Tensor:
        """Compute losses [s, b], equal on every tp rank, from this rank's part of the logits and int64 labels [s, b]."""
        raise NotImplementedError(f"{type(self).__name__} gives no of_logits")
