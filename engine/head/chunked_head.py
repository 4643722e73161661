"""Computes the output head, its cross-entropy and their gradients for one chunk of tokens at a time.

    whole     the logits X W^T [s b, V/t] are computed once and kept for the backward
    chunked   the logits of n tokens exist at a time. Their gradient overwrites them at once, so the forward computes dX and dW, by
              as many GEMMs, and the backward hands on dX

With 128,256 vocabulary entries, the logits for 8,192 tokens take 2.1 GB in bf16, and those for 1,024 tokens 263 MB.

V is the vocabulary size, t the number of tp ranks. A step knows the losses' gradients before its first forward: the loss scale, the
number of labels and the mask.

The forward overlaps the dX reduction with the last GEMM:
    1. all-gather X, and wait for it
    2. for each chunk, compute the logits and losses, write their gradient dY over them, dX = dY W, dW += dY^T X
    3. before the last dW, post the reduction of dX over tp; wait for it after the last dW
"""

from typing import Any

import torch
import torch.nn.functional as F

from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.ledger import CROSS_ENTROPY
from triaxis.engine.head.cross_entropy import LocalTargets
from triaxis.engine.head.logits import PLAIN_LOGITS, LogitOptions
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.kernels.weight_grad import add_matmul
from triaxis.engine.linear.layers import ColumnParallelLinear
from triaxis.engine.numerics.precision import accumulation_dtype


def chunked_head_losses(
    x: torch.Tensor,
    targets: torch.Tensor,
    grads: torch.Tensor,
    head: ColumnParallelLinear,
    vocab_size: int,
    tokens_at_a_time: int,
    fusion: Fusion = EAGER,
    options: LogitOptions = PLAIN_LOGITS,
) -> torch.Tensor:
    """Compute the cross-entropy per token from the head's input, and with autograd its gradients.

    The gradients have the z-loss's. The head's weight gradient is added to its main grad, even if the schedule defers weight
    gradients.

    Args:
        x: head input, [s(/t), b, h].
        targets: target ids below `vocab_size`, int64 [s, b].
        grads: gradients of the losses, [s, b] in the accumulation dtype, with which the backward will be called.
        head: output layer with one weight, [V_padded / t, h], and no bias.
        vocab_size: vocabulary size V, without padding.
        tokens_at_a_time: chunk length n in tokens, at most s b.
        fusion: runner for the passes over the logits.
        options: logit divisor, softcap and z-loss factor.

    Returns:
        The losses, [s, b] in the accumulation dtype; equal on every tp rank.
    """
    return _ChunkedHead.apply(x, targets, grads, head, vocab_size, tokens_at_a_time, fusion, options)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        targets: torch.Tensor,
        grads: torch.Tensor,
        head: ColumnParallelLinear,
        vocab_size: int,
        tokens_at_a_time: int,
        fusion: Fusion,
        options: LogitOptions,
    ) -> torch.Tensor:
        entered = head.region.enter(x.contiguous(), f"{head.name} forward").wait()
        inputs, axis = entered.flatten(0, 1), head.region.axis
        (matrix,) = head.weights.complete().views
        at = LocalTargets.of(targets, axis, matrix.shape[0], vocab_size)
        losses = inputs.new_empty(len(inputs), dtype=accumulation_dtype(x.dtype))
        starts = range(0, len(inputs), tokens_at_a_time)
        pieces = [slice(start, min(start + tokens_at_a_time, len(inputs))) for start in starts]

        def logits_of(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
            """Compute some tokens' logits, the logs of their sums of exponentials, and their losses."""
            logits, here = F.linear(inputs[rows], matrix), at[rows]
            options.shape_(logits, fusion)
            largest = axis.all_reduce(here.largest(logits), f"{CROSS_ENTROPY} max", op="max").wait()
            sums = axis.all_reduce(here.sums(logits, largest, fusion), f"{CROSS_ENTROPY} sums").wait()
            log_sum = sums[0].log() + largest
            torch.sub(log_sum, sums[1], out=losses[rows])
            return logits, log_sum

        if not ctx.needs_input_grad[0]:
            for rows in pieces:
                logits_of(rows)
            return losses.view(targets.shape)

        grad_inputs = torch.empty_like(entered)
        reduced: list[Pending] = []

        def add_pieces(main_grad: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, *, overwrite: bool) -> None:
            for rows in pieces:
                logits, log_sum = logits_of(rows)
                at[rows].write_gradient(logits, log_sum, grad[rows], fusion, options)
                torch.mm(logits, matrix, out=grad_inputs.flatten(0, 1)[rows])
                # dX is complete, and one GEMM is left to hide its reduction.
                if rows is pieces[-1]:
                    reduced.append(head.region.enter_backward(grad_inputs, f"{head.name} backward"))
                is_first = overwrite and rows is pieces[0]
                add_matmul(main_grad, logits, x[rows], overwrite=is_first, kernel=head.queue.kernel)
                del logits  # before the next piece's exist

        head.weights.accumulate(grads.flatten(), inputs, add_pieces)
        ctx.save_for_backward(reduced[0].wait())
        return losses.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_input,) = ctx.saved_tensors
        return grad_input, *[None] * 7
