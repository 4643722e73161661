"""Dispatch in which each rank picks its experts' rows from all tokens: gathered from the other ranks, or replicated on them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import EXPERTS
from triaxis.engine.config.quantities.expert_rows import buffer_rows
from triaxis.engine.expert_parallel.dispatch import SORTED, Dispatched, ExpertGroup, KnownRows, sum_rows
from triaxis.engine.expert_parallel.routing import Choice, count_values
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.kernels.grouped_gemm import Ends
from triaxis.engine.layout.shard_spec import ExpertPlace


def local_numbers(experts: torch.Tensor, place: ExpertPlace, num_local: int) -> torch.Tensor:
    """Map experts' global indices to a rank's 0 .. num_local - 1. Other ranks' experts become `num_local`."""
    local = experts - place.ep_index * num_local
    return local.where((local >= 0) & (local < num_local), num_local)


@dataclass(frozen=True, slots=True)
class _Picked:
    """Indices of the R rows that a rank picks for its experts from N tokens.

    A token has k slots, one per chosen expert. A row holds one slot's input, or is unused.

    Attributes:
        slots: index of each row's slot among the N k slots, int64 [R]; N k for an unused row.
        places: index of each slot's row, int64 [N, k]; R for a slot without a row on this rank.
        has_gaps: whether slots may have no row on this rank.
        ends: end of each local expert's rows.
        fusion: wrapper that compiles `sums`.
    """

    slots: torch.Tensor
    places: torch.Tensor
    has_gaps: bool
    ends: Ends
    fusion: Fusion

    @classmethod
    def of(cls, group: ExpertGroup, experts: torch.Tensor, num_rows: int) -> "_Picked":
        """Pick up to `num_rows` rows for this rank's experts, ordered by expert, then by token.

        The number of rows beyond `num_rows` goes to `on_overflow`.
        """
        fusion = group.fusion
        local, ends, overflow = fusion(_local_slots)(experts, group.place, group.num_local, num_rows)
        group.on_overflow(overflow)
        slots, places = fusion(_pick)(local.argsort(stable=True), ends, num_rows)
        has_gaps = group.num_local < group.moe.num_experts or num_rows < experts.numel()
        reading = partial(group.axis.ledger.host_read, f"{EXPERTS} ends")
        return cls(slots, places.view_as(experts), has_gaps, Ends(ends, reading=reading), fusion)

    def rows_of(self, values: torch.Tensor) -> torch.Tensor:
        """Gather rows [R, h] from tokens [N, h]; unused rows get the last token's values."""
        num_tokens, k = self.places.shape
        return values.index_select(0, (self.slots // k).clamp(max=num_tokens - 1))

    def weights_of(self, weights: torch.Tensor) -> torch.Tensor:
        """Gather row weights [R] from slot weights [N, k]; unused rows get the last slot's weight."""
        return weights.flatten().index_select(0, self.slots.clamp(max=weights.numel() - 1))

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum rows [R, h] over each token's experts on this rank, to [N, h] for N tokens, in the rows' dtype."""
        return sum_rows(rows, self.places, self.fusion, has_gaps=self.has_gaps)

    def slots_from(self, values: torch.Tensor) -> torch.Tensor:
        """Map row values [R] to slots [N, k]; slots without a row on this rank get 0."""
        of_slots = sum_rows(values.unsqueeze(1), self.places.view(-1, 1), EAGER, has_gaps=self.has_gaps)
        return of_slots.view_as(self.places)


def _local_slots(
    experts: torch.Tensor, place: ExpertPlace, num_local: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find what a rank sorts to pick its rows.

    Returns:
        The slots' local experts, int16 [N k]: other ranks' have the number `num_local`, so the sort puts them last; the ends of the
        local experts' rows in a buffer with `num_rows` rows, int32 [num_local]; and the number of rows beyond it, an int64 scalar.
    """
    local = local_numbers(experts, place, num_local).flatten()
    ends = count_values(local, num_local + 1)[:-1].cumsum(0)
    overflow = (ends[-1] - num_rows).clamp(min=0)
    return local.to(SORTED), ends.clamp(max=num_rows).to(torch.int32), overflow


def _pick(order: torch.Tensor, ends: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `slots` and `places` of `_Picked`; the places are flat, [N k]."""
    numbers = torch.arange(len(order), device=order.device)
    is_used = numbers < ends[-1]
    # They are inverse permutations, except at unused rows and at slots without a row here.
    slots = order[:num_rows].where(is_used[:num_rows], len(order))
    return slots, torch.empty_like(order).index_copy(0, order, numbers.where(is_used, num_rows))


class GatherDispatch:
    """Dispatch by all-gather and reduce-scatter.

    Attributes:
        known: row counts for a rank that `triaxis.launch.footprint` simulates; None in a training run.
    """

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group
        self.known: KnownRows | None = None

    def begin(self, choice: Choice) -> Callable[[torch.Tensor, torch.Tensor], Dispatched]:
        """Post the all-gather of the chosen experts; return the function that dispatches (see `Dispatch`)."""
        group, (num_tokens, _) = self._group, choice.experts.shape
        gathered = group.axis.all_gather(choice.experts, f"{EXPERTS} choice")
        num_rows = buffer_rows(group.moe, num_tokens, group.place.ep, group.place.etp)

        def dispatch(x: torch.Tensor, weights: torch.Tensor) -> Dispatched:
            whole = gathered.wait()
            # `_Gather` calls `pick` while the tokens' all-gather is in flight.
            pick = partial(_Picked.of, group, whole, num_rows)
            rows, row_weights, picked = _Gather.apply(x, weights, pick, group.axis)
            group.keep(picked.slots, picked.places)
            if self.known is not None:
                picked.ends.host = self.known.ends(num_rows)
            return Dispatched(rows, row_weights, picked.ends, lambda out: _Scatter.apply(out, picked, group.axis))

        return dispatch


class _Gather(torch.autograd.Function):
    """All-gather x [T, h], weights [T, k] -> this rank's rows [R, h], their weights [R] and indices (`_Picked`).

    It saves only the indices.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, pick: Callable[[], _Picked], axis: Axis
    ) -> tuple[torch.Tensor, torch.Tensor, _Picked]:
        posted = [axis.all_gather(each, f"{EXPERTS} forward") for each in (x, weights)]
        picked = pick()
        ctx.picked, ctx.axis = picked, axis
        tokens, of_slots = (each.wait() for each in posted)
        return picked.rows_of(tokens), picked.weights_of(of_slots), picked

    @staticmethod
    def backward(
        ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor, _: None
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        picked: _Picked = ctx.picked
        # This rank's rows give partial sums for all N tokens; the reduce-scatter adds them and keeps this rank's T.
        posted = [
            ctx.axis.reduce_scatter(each, f"{EXPERTS} backward")
            for each in (picked.sums(grad_rows), picked.slots_from(grad_weights))
        ]
        grad_x, grad_slots = (each.wait() for each in posted)
        return grad_x, grad_slots, None, None


class _Scatter(torch.autograd.Function):
    """Reduce-scatter row outputs [R, h], summed over each token's experts -> this rank's tokens [T, h]."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, picked: _Picked, axis: Axis) -> torch.Tensor:
        ctx.picked, ctx.axis = picked, axis
        return axis.reduce_scatter(picked.sums(out), f"{EXPERTS} forward").wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        whole = ctx.axis.all_gather(grad.contiguous(), f"{EXPERTS} backward").wait()
        return ctx.picked.rows_of(whole), None, None


class ReplicatedDispatch:
    """Dispatch without gradients, for tokens that every rank has."""

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group

    def begin(self, choice: Choice) -> Callable[[torch.Tensor, torch.Tensor], Dispatched]:
        """Pick the rows for this rank's experts; return the function that dispatches."""
        group, (num_tokens, k) = self._group, choice.experts.shape
        picked = _Picked.of(group, choice.experts, num_tokens * min(k, group.num_local))

        def combine(out: torch.Tensor) -> torch.Tensor:
            return group.axis.all_reduce(picked.sums(out), f"{EXPERTS} forward").wait()

        return lambda x, weights: Dispatched(picked.rows_of(x), picked.weights_of(weights), picked.ends, combine)
