"""Cross-entropy of logits whose vocabulary is cut over tp; the whole row of logits never exists on one rank.

    loss = log(sum_v exp(z_v)) - z_target

Three numbers per token cross the tp axis: the largest logit (max, for stability), then the sum of exponentials and the
target's logit together. Columns past the vocabulary (padding) are left out of the softmax and get gradient zero.
The backward recomputes the softmax from the logits and the log of the sum, [s, b], instead of keeping it in fp32.
"""

from typing import Any

import torch
import torch.nn.functional as F

from engine.collectives import Axis
from engine.precision import accumulate, accumulation_dtype


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, axis: Axis, vocab_size: int
) -> torch.Tensor:
    """Loss per token.

    Args:
        logits: [s, b, V_padded / t], this rank's columns.
        targets: int64 [s, b], ids below `vocab_size`.
        axis: the tp axis.
        vocab_size: V, without padding.

    Returns:
        [s, b] in the accumulation dtype; the same on every tp rank.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, axis, vocab_size)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, axis: Axis, vocab_size: int) -> torch.Tensor:
        columns = logits.shape[-1]
        first = axis.index * columns
        # Columns of this rank inside the vocabulary; padding stands at the end, so the last ranks may have none.
        real = min(max(vocab_size - first, 0), columns)
        z = logits[..., :real]
        local = targets - first
        held = (local >= 0) & (local < real)
        local = local.where(held, 0)

        if real:
            largest = accumulate(z.amax(-1))
        else:
            wide = accumulation_dtype(logits.dtype)
            largest = z.new_full(targets.shape, torch.finfo(wide).min, dtype=wide)
        largest = axis.all_reduce(largest, "cross-entropy max", op="max").wait()
        sums = largest.new_zeros((2, *targets.shape))
        if real:
            sums[0] = _exp_of_difference(z, largest).sum(-1)
            sums[1] = z.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(held, 0)
        sums = axis.all_reduce(sums, "cross-entropy sums").wait()
        log_sum = sums[0].log() + largest

        ctx.save_for_backward(logits, log_sum, local, held)
        ctx.real = real
        return log_sum - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, log_sum, local, held = ctx.saved_tensors
        columns = logits.shape[-1]
        if ctx.real == 0:
            return torch.zeros_like(logits), None, None, None
        grad_logits = _exp_of_difference(logits[..., : ctx.real], log_sum)
        grad_logits.scatter_add_(-1, local.unsqueeze(-1), -held.unsqueeze(-1).to(grad_logits.dtype))
        grad_logits = grad_logits.mul_(grad.unsqueeze(-1)).to(logits.dtype)
        if ctx.real < columns:
            grad_logits = F.pad(grad_logits, (0, columns - ctx.real))
        return grad_logits, None, None, None


def _exp_of_difference(z: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """exp(z - shift) in the accumulation dtype, which `shift` has, with one temporary. z [s, b, v], shift [s, b]."""
    return z.sub(shift.unsqueeze(-1)).exp_()
