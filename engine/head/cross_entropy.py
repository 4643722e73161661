"""Computes the cross-entropy of logits whose vocabulary is cut over tp.

    loss = log(sum_v exp(z_v)) - z_target          d loss / d z_v = exp(z_v) / sum_u exp(z_u) - [v = target]

z_v is the logit for vocabulary entry v; [v = target] is 1 for the target's entry, else 0. Three numbers per token cross the tp
axis: the largest logit, the exponentials' sum, and the target's logit. Columns past the vocabulary (padding) are left out of the
softmax and get a zero gradient.

The exponentials never all exist at once, because they would need more memory than the logits. The backward recomputes the softmax
from the logits and the log of the sum, [s, b]. It writes the gradient over the logits.
"""

from dataclasses import dataclass
from typing import Any

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import CROSS_ENTROPY
from triaxis.engine.head.logits import PLAIN_LOGITS, LogitOptions, chunks, slope
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.numerics.precision import accumulate, accumulation_dtype


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    axis: Axis,
    vocab_size: int,
    fusion: Fusion = EAGER,
    options: LogitOptions = PLAIN_LOGITS,
) -> torch.Tensor:
    """Compute the cross-entropy per token, without the z-loss. The backward adds the z-loss gradient.

    Args:
        logits: this rank's columns in the head's product, contiguous, [s, b, V_padded / t]; overwritten in forward and backward.
        targets: target ids below `vocab_size`, int64 [s, b].
        axis: tp axis.
        vocab_size: vocabulary size V, without padding.
        fusion: runner for the passes over the logits.
        options: logit divisor, softcap and z-loss factor.

    Returns:
        The losses, [s, b] in the accumulation dtype; equal on every tp rank.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, axis, vocab_size, fusion, options)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        axis: Axis,
        vocab_size: int,
        fusion: Fusion,
        options: LogitOptions,
    ) -> torch.Tensor:
        logits = logits.detach()  # written to without autograd's notice
        options.shape_(logits, fusion)
        flat = logits.view(-1, logits.shape[-1])
        at = LocalTargets.of(targets, axis, flat.shape[1], vocab_size)
        # [tokens], then [2, tokens] for both sums at once. Nothing can overlap these calls: the next line needs the result.
        largest = axis.all_reduce(at.largest(flat), f"{CROSS_ENTROPY} max", op="max").wait()
        sums = axis.all_reduce(at.sums(flat, largest, fusion), f"{CROSS_ENTROPY} sums").wait()
        log_sum = sums[0].log() + largest

        ctx.save_for_backward(logits, log_sum, at.local, at.held)
        ctx.real, ctx.fusion, ctx.options = at.real, fusion, options
        return (log_sum - sums[1]).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, log_sum, local, held = ctx.saved_tensors
        # No collective: log_sum covers the whole vocabulary, and this rank's columns need nothing else from other ranks.
        # The gradient overwrites the logits, so a second backward through this graph would read gradients.
        flat = logits.view(-1, logits.shape[-1])
        LocalTargets(local, held, ctx.real).write_gradient(flat, log_sum, grad.flatten(), ctx.fusion, ctx.options)
        return logits, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class LocalTargets:
    """Targets relative to this rank's columns, for logits [tokens, columns].

    Attributes:
        local: column of each token's target, int64 [tokens]; 0 if another rank holds it.
        held: whether this rank holds the target's column, bool [tokens].
        real: number of columns on this rank inside the vocabulary. Padding is at the end, so the last ranks may have none.
    """

    local: torch.Tensor
    held: torch.Tensor
    real: int

    @classmethod
    def of(cls, targets: torch.Tensor, axis: Axis, columns: int, vocab_size: int) -> "LocalTargets":
        """Build the targets from flattened ids of any shape. `columns`: logit columns per rank, padding included."""
        first = axis.index * columns
        real = min(max(vocab_size - first, 0), columns)
        local = targets.reshape(-1) - first
        held = (local >= 0) & (local < real)
        return cls(local.where(held, 0), held, real)

    def __getitem__(self, rows: slice) -> "LocalTargets":
        """Select the targets for a range of tokens."""
        return LocalTargets(self.local[rows], self.held[rows], self.real)

    def largest(self, logits: torch.Tensor) -> torch.Tensor:
        """Find each token's largest logit, [tokens] in the accumulation dtype.

        If all columns are padding, the result is the dtype's minimum.
        """
        # The maximum is one of the narrow numbers, so widening only the maximum is exact.
        if self.real:
            return accumulate(logits[:, : self.real].amax(-1))
        wide = accumulation_dtype(logits.dtype)
        return logits.new_full(self.local.shape, torch.finfo(wide).min, dtype=wide)

    def sums(self, logits: torch.Tensor, largest: torch.Tensor, fusion: Fusion) -> torch.Tensor:
        """Compute this rank's share of two sums per token, [2, tokens].

        They are the sum of exp(z - largest), and the target's logit.
        """
        sums = largest.new_zeros((2, len(largest)))
        if self.real:
            z = logits[:, : self.real]
            if fusion.is_compiled:
                sums[0] = fusion(_sum_of_exp)(z, largest)
            else:
                for rows in chunks(z):
                    torch.sum(_exp_of_difference(z[rows], largest[rows]), -1, out=sums[0, rows])
            sums[1] = z.gather(-1, self.local.unsqueeze(-1)).squeeze(-1).where(self.held, 0)
        return sums

    def write_gradient(
        self, logits: torch.Tensor, log_sum: torch.Tensor, grad: torch.Tensor, fusion: Fusion, options: LogitOptions
    ) -> None:
        """Overwrite logits z with the loss gradient for the head's product y.

        The gradient is dy_v = (softmax_v (1 + 2 z_loss Z) - [v = target]) grad dz_v / dy_v, where Z = log_sum. `log_sum` and `grad`
        are [tokens].
        """
        z, grad = logits[:, : self.real], grad.unsqueeze(-1)
        if self.real and fusion.is_compiled:
            shape = options.divisor, options.softcap, options.z_loss
            fusion(_write_gradient)(z, log_sum, self.local, self.held, grad, *shape)
        elif self.real:
            # -1 at the target's column. A token whose target is on another rank adds zero to column 0.
            ones = self.held.to(grad.dtype).neg_().unsqueeze(-1)
            for rows in chunks(z):
                softmax = _exp_of_difference(z[rows], log_sum[rows])
                # The factor applies only to the softmax, so it comes before the target's 1 is subtracted.
                if options.z_loss:
                    softmax.mul_((1 + 2 * options.z_loss * log_sum[rows]).unsqueeze(-1))
                softmax.scatter_add_(-1, self.local[rows].unsqueeze(-1), ones[rows])
                softmax.mul_(grad[rows])
                z[rows] = (
                    softmax if options.is_plain else softmax.mul_(slope(z[rows], options.divisor, options.softcap))
                )
        # Padding does not affect the loss, but the GEMMs that follow read all columns.
        logits[:, self.real :].zero_()


def _sum_of_exp(z: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Compute sum_v exp(z - largest), [tokens]; z [tokens, v], largest [tokens]."""
    return _exp_of_difference(z, largest).sum(-1)


def _write_gradient(
    z: torch.Tensor,
    log_sum: torch.Tensor,
    local: torch.Tensor,
    held: torch.Tensor,
    grad: torch.Tensor,
    divisor: float,
    softcap: float | None,
    z_loss: float,
) -> None:
    """Overwrite logits z [tokens, v] with `LocalTargets.write_gradient`'s gradient, in a form for inductor."""
    columns = torch.arange(z.shape[1], device=z.device)
    is_target = (columns == local.unsqueeze(-1)) & held.unsqueeze(-1)
    softmax = _exp_of_difference(z, log_sum)
    if z_loss:
        softmax = softmax * (1 + 2 * z_loss * log_sum).unsqueeze(-1)
    gradient = (softmax - is_target.to(grad.dtype)) * grad
    z.copy_(gradient if softcap is None and divisor == 1 else gradient * slope(z, divisor, softcap))


def _exp_of_difference(z: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Compute exp(z - shift) in `shift`'s dtype, with one temporary; z [n, v], shift [n]."""
    return z.sub(shift.unsqueeze(-1)).exp_()
