"""Attends from a rank's queries to keys and values gathered over cp (2407.21783, section 3.3.2).

    q [b, n, s/c, d], k, v [b, n_kv, s/c, d] --all-gather k, v--> k, v [b, n_kv, s, d] --kernel--> out [b, n, s/c, d]
    backward   gather k, v again --kernel--> grad q, grad k, v [b, n_kv, s, d] --reduce-scatter--> [b, n_kv, s/c, d]

Here b is the microbatch size, s the sequence length, c the number of cp ranks, d the head size. The rank has n query heads and n_kv
key/value heads. It saves q, its local k and v, the output and the log-sum-exp. Whole keys and values exist only while they are
used.

Heads are processed in pieces. A piece has some key/value heads, and the query heads that read them. One piece is gathered while the
kernel runs on another:

    forward    gather 0   gather 1 | attention 0     gather 2 | attention 1     ...
    backward   gather 0   gather 1 | backward 0      gather 2, sum 0 | backward 1      ...
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch

from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import ATTENTION_MARK, KEYS_AND_VALUES
from triaxis.engine.config.quantities.context_parallel import heads_of_pieces
from triaxis.engine.config.schema.layout import ParallelConfig
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.context_parallel.mixer import Mixer, heads_first, tokens_first
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.kernels.attention import masked_kernel
from triaxis.engine.kernels.masked_attention import Kernel, Mask, attend, grad_of_sinks
from triaxis.engine.numerics.precision import accumulation_dtype
from triaxis.engine.tensor_parallel.dropout import DropoutKeys

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class HeadSlices:
    """One piece of heads: a slice of key/value heads, and the slice of query heads that read them."""

    keys: slice
    queries: slice


@dataclass(frozen=True, slots=True)
class ContextParallelRegion:
    """Context-parallel axis and its gather settings.

    Attributes:
        axis: ranks that share each row (sample).
        keeps_gathered: whether gathered keys and values are saved for the backward, instead of gathered again.
        sums_wide: whether key and value gradients are summed in the accumulation dtype rather than the run's dtype.
    """

    axis: Axis
    keeps_gathered: bool = False
    sums_wide: bool = False

    @classmethod
    def of(cls, parallel: ParallelConfig, recompute: RecomputeConfig, axis: Axis) -> "ContextParallelRegion":
        """Build a rank's region; `auto` in `recompute` is already resolved."""
        return cls(axis, recompute.gathered_kv == "keep", parallel.cp_gradients == "accumulation")

    def gathers(self, packed: Sequence[torch.Tensor], part: SequencePart, purpose: str) -> Iterator[KeysAndValues]:
        """Yield keys and values for whole rows, gathered one piece of heads at a time.

        Keys and values are [b, n_j, s, d] each, with tokens in row order. The next piece's gather is in flight meanwhile.

        Args:
            packed: this rank's keys and values for each piece, [s/c, b, 2, n_j, d]; piece j has n_j key/value heads.
            part: this rank's part of each row.
        """
        under_way: list[Pending] = []
        for shard in packed:
            under_way.append(self.axis.all_gather(shard, f"{KEYS_AND_VALUES} {purpose}"))
            if len(under_way) == 2:
                yield self._rows(under_way.pop(0), part)
        yield self._rows(under_way.pop(), part)

    @staticmethod
    def _rows(gather: Pending, part: SequencePart) -> KeysAndValues:
        # Gathered blocks are in rank order; `to_rows` puts their tokens in row order: [s, b, 2, n_j, d].
        rows = reordered(gather.wait(), part.to_rows)
        return rows[:, :, 0].permute(1, 2, 0, 3), rows[:, :, 1].permute(1, 2, 0, 3)

    def sum_of(self, k: torch.Tensor, v: torch.Tensor, part: SequencePart, dtype: torch.dtype) -> Pending:
        """Post the reduce-scatter for whole rows' key and value gradients [b, n_j, s, d].

        n_j counts the key/value heads in one piece of heads.

        Args:
            dtype: the keys' and values' dtype.
        """
        packed = torch.stack((k, v)).permute(3, 1, 0, 2, 4)
        packed = packed.to(accumulation_dtype(dtype) if self.sums_wide else dtype)
        return self.axis.reduce_scatter(reordered(packed, part.to_parts), f"{KEYS_AND_VALUES} gradients")


def pack_keys_and_values(k: torch.Tensor, v: torch.Tensor, heads: slice) -> torch.Tensor:
    """Copy some heads from k, v [b, n_kv, s/c, d] to [s/c, b, 2, n_j, d], the layout for the gather."""
    return torch.stack((k[:, heads], v[:, heads])).permute(3, 1, 0, 2, 4).contiguous()


def local_gradients(summed: Pending, dtype: torch.dtype) -> KeysAndValues:
    """Wait for this rank's summed key and value gradients, [b, n_j, s/c, d] each."""
    mine = summed.wait().to(dtype)
    return mine[:, :, 0].permute(1, 2, 0, 3), mine[:, :, 1].permute(1, 2, 0, 3)


@cache
def pieces_of(num_heads: int, num_kv_heads: int) -> list[HeadSlices]:
    """Split a rank's heads into pieces whose numbers of key/value heads differ by at most one."""
    group = num_heads // num_kv_heads
    bounds = pairwise(accumulate(heads_of_pieces(num_kv_heads), initial=0))
    return [HeadSlices(slice(first, stop), slice(first * group, stop * group)) for first, stop in bounds]


def reordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Permute x [s, b, ..] so that element i of the flattened dims [s b] is x's element `order[i]`."""
    return x.flatten(0, 1).index_select(0, order).view(x.shape)


@dataclass(kw_only=True, eq=False)
class GatheredKeys(Mixer):
    """Mixer that gathers keys and values over cp while attention runs.

    MLA and the `explicit` kernel use `GatheredRows` instead.
    """

    copies_rows: ClassVar[bool] = True

    region: ContextParallelRegion

    def __call__(
        self, q: torch.Tensor, rows: Sequence[torch.Tensor], mask: Mask, keys: DropoutKeys | None
    ) -> torch.Tensor:
        """Attend from q [s/c, b, n, d] to gathered k and v -> [s/c, b, n * d].

        This rank's k and v are [s/c, b, n_kv, d]. Unlike `Mixer.mixed`, this method never recomputes attention, because a
        collective must not run inside a recompute.
        """
        kernel = masked_kernel(
            self.kernels.choices.attention, q.device, mask, self.scale, self.softcap, self.kernels.fusion
        )
        sinks = self.sinks_of(slice(0, q.shape[2]))
        return tokens_first(_ContextAttention.apply(*heads_first(q, *rows), sinks, kernel, mask.part, self.region))


class _ContextAttention(torch.autograd.Function):
    """Attention over gathered keys and values, one piece of heads at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        kernel: Kernel[Any],
        part: SequencePart,
        region: ContextParallelRegion,
    ) -> torch.Tensor:
        b, n, s, d = q.shape  # s is this rank's s/c here
        pieces = pieces_of(n, k.shape[1])
        # Allocated as [s, b, n, d], so that `tokens_first` is a view.
        out = q.new_empty(s, b, n, d).permute(1, 2, 0, 3)
        lse = q.new_empty(b, n, s, dtype=accumulation_dtype(q.dtype))
        # Copied, because k and v may be views into a larger tensor that would stay alive with them.
        kept = [pack_keys_and_values(k, v, piece.keys) for piece in pieces]
        gathers = region.gathers(tuple(kept), part, "forward")
        if region.keeps_gathered:
            kept = []
        for piece, whole in zip(pieces, gathers, strict=True):
            heads = piece.queries
            region.axis.ledger.mark(ATTENTION_MARK, "forward")
            out[:, heads], lse[:, heads] = attend(kernel, q[:, heads], *whole, None if sinks is None else sinks[heads])
            kept += whole if region.keeps_gathered else ()
        ctx.kernel, ctx.part, ctx.region, ctx.pieces = kernel, part, region, pieces
        ctx.save_for_backward(q, out, lse, sinks, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, out, lse, sinks, *kept = ctx.saved_tensors
        part: SequencePart = ctx.part
        region: ContextParallelRegion = ctx.region
        pieces: list[HeadSlices] = ctx.pieces
        wholes: Iterable[KeysAndValues]
        if region.keeps_gathered:  # k and v of each piece alternate in `kept`
            wholes = zip(kept[::2], kept[1::2], strict=True)
        else:
            wholes = region.gathers(kept, part, "backward")
        grad_q = torch.empty_like(q)
        local: list[KeysAndValues] = []
        sums: list[Pending] = []
        for piece, whole in zip(pieces, wholes, strict=True):
            heads = piece.queries
            region.axis.ledger.mark(ATTENTION_MARK, "backward")
            grad_q[:, heads], whole_k, whole_v = ctx.kernel.backward(
                grad[:, heads], q[:, heads], *whole, out[:, heads], lse[:, heads]
            )
            sums.append(region.sum_of(whole_k, whole_v, part, q.dtype))
            # Wait for a piece's sum only after the next piece's backward, which overlaps it.
            if len(sums) == 2:
                local.append(local_gradients(sums.pop(0), q.dtype))
        local.append(local_gradients(sums.pop(), q.dtype))
        grad_k, grad_v = (torch.cat(each, dim=1) for each in zip(*local, strict=True))
        return grad_q, grad_k, grad_v, grad_of_sinks(grad, out, lse, sinks), None, None, None
