"""Computes the output head and its cross-entropy for one chunk of tokens at a time.

    whole     the logits X W^T [s b, V/t] are computed once and kept for the backward
    chunked   the logits of n tokens exist at a time, and the backward recomputes them with one more head GEMM

With 128,256 vocabulary entries, the logits for 8,192 tokens take 2.1 GB in bf16, and those for 1,024 tokens 263 MB.

V is the vocabulary size, t the number of tp ranks. Rank i computes S_i = sum exp(z - m_i) over its own columns, where m_i is its
largest logit. With the global maximum m, the sum over the vocabulary is sum_i exp(m_i - m) S_i.

The backward overlaps the dX reduction with the last GEMM:
    1. all-gather X, and wait for it (sequence parallelism keeps only a shard)
    2. for each chunk, recompute the logits, write their gradient dY over them, dX = dY W, dW += dY^T X
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


def chunked_head_losses(
    x: torch.Tensor,
    targets: torch.Tensor,
    head: ColumnParallelLinear,
    vocab_size: int,
    tokens_at_a_time: int,
    fusion: Fusion = EAGER,
    options: LogitOptions = PLAIN_LOGITS,
) -> torch.Tensor:
    """Compute the cross-entropy per token from the head's input.

    The backward adds the z-loss gradient. The head's weight gradient is computed at once, even if the schedule defers weight
    gradients.

    Args:
        x: head input, [s(/t), b, h].
        targets: target ids below `vocab_size`, int64 [s, b].
        head: output layer with one weight, [V_padded / t, h], and no bias.
        vocab_size: vocabulary size V, without padding.
        tokens_at_a_time: chunk length n in tokens, at most s b.
        fusion: runner for the passes over the logits.
        options: logit divisor, softcap and z-loss factor.

    Returns:
        The losses, [s, b] in the accumulation dtype; equal on every tp rank.
    """
    return _ChunkedHead.apply(x, targets, head, vocab_size, tokens_at_a_time, fusion, options)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        targets: torch.Tensor,
        head: ColumnParallelLinear,
        vocab_size: int,
        tokens_at_a_time: int,
        fusion: Fusion,
        options: LogitOptions,
    ) -> torch.Tensor:
        x = x.contiguous()
        axis = head.region.axis
        entered = head.region.enter(x, f"{head.name} forward").wait()
        inputs = entered.flatten(0, 1)
        (matrix,) = head.weights.complete().views
        at = LocalTargets.of(targets, axis, matrix.shape[0], vocab_size)
        starts = range(0, len(inputs), tokens_at_a_time)
        pieces = [slice(start, min(start + tokens_at_a_time, len(inputs))) for start in starts]
        of_pieces = []
        # Each piece's exponentials are relative to its own maximum on this rank: the global one is known only after the last piece.
        for rows in pieces:
            logits = F.linear(inputs[rows], matrix)
            options.shape_(logits, fusion)
            here = at[rows].largest(logits)
            of_pieces.append((here, at[rows].sums(logits, here, fusion)))
            del logits  # before the next piece's exist
        mine = torch.cat([here for here, _ in of_pieces])
        sums = torch.cat([sums for _, sums in of_pieces], dim=1)
        largest = axis.all_reduce(mine.clone(), f"{CROSS_ENTROPY} max", op="max").wait()
        # Relative to the global maximum from here on: exp(z - mine) exp(mine - largest) = exp(z - largest).
        sums[0] *= (mine - largest).exp_()
        sums = axis.all_reduce(sums, f"{CROSS_ENTROPY} sums").wait()
        log_sum = sums[0].log() + largest

        ctx.save_for_backward(head.region.kept(x, entered), log_sum, at.local, at.held)
        ctx.head, ctx.real, ctx.pieces = head, at.real, pieces
        ctx.fusion, ctx.options = fusion, options
        return (log_sum - sums[1]).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None, None]:
        head: ColumnParallelLinear = ctx.head
        kept, log_sum, local, held = ctx.saved_tensors
        at, grad = LocalTargets(local, held, ctx.real), grad.flatten()
        whole = head.region.enter_again(kept, f"{head.name} regather").wait()
        inputs, grad_inputs = whole.flatten(0, 1), torch.empty_like(whole)
        (matrix,) = head.weights.complete().views
        reduced: list[Pending] = []

        def add_pieces(main_grad: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, *, overwrite: bool) -> None:
            for rows in ctx.pieces:
                logits = F.linear(x[rows], matrix)
                ctx.options.shape_(logits, ctx.fusion)
                at[rows].write_gradient(logits, log_sum[rows], grad[rows], ctx.fusion, ctx.options)
                torch.mm(logits, matrix, out=grad_inputs.flatten(0, 1)[rows])
                # dX is complete, and one GEMM is left to hide its reduction.
                if rows is ctx.pieces[-1]:
                    reduced.append(head.region.enter_backward(grad_inputs, f"{head.name} backward"))
                is_first = overwrite and rows is ctx.pieces[0]
                add_matmul(main_grad, logits, x[rows], overwrite=is_first, kernel=head.queue.kernel)
                del logits

        head.weights.accumulate(grad, inputs, add_pieces)
        return reduced[0].wait(), None, None, None, None, None, None
