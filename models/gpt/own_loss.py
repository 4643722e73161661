"""The base class of an extension's loss."""

import torch
from torch import nn

from triaxis.engine.head.vocabulary import VocabularyLogits
from triaxis.engine.linear.layers import ColumnParallelLinear
from triaxis.models.gpt.context import BuildContext
from triaxis.models.gpt.losses import logit_options


class LogitLosses(nn.Module):
    """A loss of logits: a subclass gives `of_logits`.

    A loss of hidden states overrides `forward`, and computes this rank's columns of the logits with `head(x)`, [s, b, V_padded/t].
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.context = context

    def forward(self, x: torch.Tensor, head: ColumnParallelLinear, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses [s, b], equal on every tp rank, of x [s(/t), b, h] that the head reads and labels int64 [b, s]."""
        model, axis = self.context.model, self.context.region.axis
        logits = logit_options(model).shaped(head(x))
        return self.of_logits(VocabularyLogits.of(logits, axis, model.vocab_size), labels.t())

    def of_logits(self, logits: VocabularyLogits, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses [s, b], equal on every tp rank, of labels int64 [s, b]."""
        raise NotImplementedError(f"{type(self).__name__} gives no of_logits")
