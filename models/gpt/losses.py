"""Compute each token's loss from the output head's logits."""

import torch
from torch import nn

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.head.chunked_head import chunked_head_losses
from triaxis.engine.head.cross_entropy import vocab_parallel_cross_entropy
from triaxis.engine.head.logits import LogitOptions
from triaxis.engine.linear.layers import ColumnParallelLinear
from triaxis.engine.numerics.precision import accumulation_dtype
from triaxis.models.gpt.context import BuildContext


def logit_options(model: ModelConfig) -> LogitOptions:
    """Collect the model's logit divisor, softcap and z-loss factor."""
    return LogitOptions(model.logit_divisor, model.logit_softcap, model.z_loss)


def token_grads(
    context: BuildContext, mask: torch.Tensor, output: int = 0, factor: float = 1.0
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of an output's token losses, if their forward computes the head's gradient, else nothing.

    The output is the sum of losses times `mask` [s, b], times `factor`.
    """
    if context.output_grad is None:
        return ()
    return ((context.output_grad[output].to(accumulation_dtype(context.dtype)) * factor) * mask,)


class TokenLosses(nn.Module):
    """Each token's cross-entropy, computed from the head's input.

    Each tp rank computes the logits for its part of the vocabulary. A z-loss changes only the gradients, not the result.
    """

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.context = context
        self.options = logit_options(context.model)

    def forward(
        self, x: torch.Tensor, head: ColumnParallelLinear, labels: torch.Tensor, grads: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute token losses [s, b], equal on all tp ranks.

        Args:
            x: the head's input, [s(/t), b, h].
            labels: int64 [b, s].
            grads: the losses' gradients [s, b], as `token_grads` computes them.
        """
        context, targets = self.context, labels.t()
        vocab_size, fusion = context.model.vocab_size, context.kernels.fusion
        if context.head_tokens is not None:
            assert grads is not None, "a head in pieces computes its gradient in the forward"
            return chunked_head_losses(x, targets, grads, head, vocab_size, context.head_tokens, fusion, self.options)
        return vocab_parallel_cross_entropy(head(x), targets, context.region.axis, vocab_size, fusion, self.options)
