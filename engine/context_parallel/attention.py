"""Attention of a rank's part of each row to all of the row: keys and values are gathered over cp (2407.21783, section 3.3.2).

    q [b, n, s/c, d], k, v [b, n_kv, s/c, d] --all-gather k, v--> k, v [b, n_kv, s, d] --kernel--> out [b, n, s/c, d]
    backward   gather k, v again --kernel--> grad of q, and of k, v [b, n_kv, s, d] --reduce-scatter--> [b, n_kv, s/c, d]

One autograd function has the gather and the attention: what it saves are q, the local k and v, the output and its logarithms.
So the kernel's forward runs once, and whole keys and values exist while they are used.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.comm.collectives import Axis
from engine.comm.ledger import KEYS_AND_VALUES
from engine.data.sequence_part import SequencePart
from engine.kernels.masked_attention import Kernel, attend, grad_of_sinks

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ContextParallelRegion:
    """The cp axis, and whether gathered keys and values are kept for the backward.

    Attributes:
        axis: the ranks that share each row.
        keeps_gathered: keep them whole; False: gather them again.
    """

    axis: Axis
    keeps_gathered: bool = False

    def gather(self, k: torch.Tensor, v: torch.Tensor, part: SequencePart, purpose: str) -> Pair:
        """Gather keys and values [b, n_kv, s/c, d] to [b, n_kv, s, d], in the order of the row."""
        packed = torch.stack((k, v)).permute(3, 1, 0, 2, 4).contiguous()
        whole = self.axis.all_gather(packed, f"{KEYS_AND_VALUES} {purpose}").wait()
        rows = _reordered(whole, part.to_rows)
        return rows[:, :, 0].permute(1, 2, 0, 3), rows[:, :, 1].permute(1, 2, 0, 3)

    def reduce(self, k: torch.Tensor, v: torch.Tensor, part: SequencePart) -> Pair:
        """Sum gradients of whole keys and values over the ranks, and keep those of the local ones."""
        packed = torch.stack((k, v)).permute(3, 1, 0, 2, 4)
        mine = self.axis.reduce_scatter(_reordered(packed, part.to_parts), f"{KEYS_AND_VALUES} gradients").wait()
        return mine[:, :, 0].permute(1, 2, 0, 3), mine[:, :, 1].permute(1, 2, 0, 3)

    def attention(
        self,
        kernel: Kernel,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        part: SequencePart,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from q [b, n, s/c, d] to the whole rows of k, v [b, n_kv, s/c, d] -> [b, n, s/c, d]."""
        return _ContextAttention.apply(q, k, v, sinks, kernel, part, self)

    def gathered(self, k: torch.Tensor, v: torch.Tensor, part: SequencePart) -> Pair:
        """Gather keys and values with a gradient, for attention in plain operators."""
        return _Gather.apply(k, v, part, self)


def _reordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return x [s, b, ..] with element i of [s b] taken from `order[i]`."""
    return x.flatten(0, 1).index_select(0, order).view(x.shape)


class _ContextAttention(torch.autograd.Function):
    """The gather, and the kernel's own forward and backward, once each."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        kernel: Kernel,
        part: SequencePart,
        region: ContextParallelRegion,
    ) -> torch.Tensor:
        whole = region.gather(k, v, part, "forward")
        out, lse = attend(kernel, q, *whole, sinks)
        ctx.kernel, ctx.part, ctx.region = kernel, part, region
        ctx.save_for_backward(q, *(whole if region.keeps_gathered else (k, v)), out, lse, sinks)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        region: ContextParallelRegion = ctx.region
        whole = (k, v) if region.keeps_gathered else region.gather(k, v, ctx.part, "backward")
        grad_q, whole_k, whole_v = ctx.kernel.backward(grad, q, *whole, out, lse)
        grad_k, grad_v = region.reduce(whole_k, whole_v, ctx.part)
        return grad_q, grad_k, grad_v, grad_of_sinks(grad, out, lse, sinks), None, None, None


class _Gather(torch.autograd.Function):
    """Whole keys and values; the backward sums their gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, part: SequencePart, region: ContextParallelRegion) -> Pair:
        ctx.part, ctx.region = part, region
        return region.gather(k, v, part, "forward")

    @staticmethod
    def backward(ctx: Any, grad_k: torch.Tensor, grad_v: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.region.reduce(grad_k, grad_v, ctx.part), None, None
