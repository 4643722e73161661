"""Sends tokens to the ranks that hold their experts, and the outputs back.

    x [T, h], weights and experts [T, k]  --dispatch-->  rows [R, h] for this rank's experts, ordered by expert
    row outputs [R, h]                    --combine-->   y [T, h], summed over each token's experts

T is the number of tokens on this rank, h the hidden size, k the number of experts per token, R the number of rows. One set of
experts is divided over n = ep x etp ranks. With etp > 1 the etp ranks that share an expert get the same rows, and their outputs are
partial sums. No form of dispatch drops a token:

    GatherDispatch       Every rank all-gathers all n T tokens and picks its experts' rows. Outputs are reduce-scattered.
                         The buffer has a fixed row count, so the host reads no counts.
                         If rows overflow the buffer, the step fails without an update.
    ExchangeDispatch     Ranks exchange rows by all-to-all. The host reads row counts, once per layer and pass.
    ReplicatedDispatch   Every rank has the same tokens (generation) and picks its experts' rows. Outputs are all-reduced.

Dispatch's backward uses combine's communication, and vice versa. A token has k slots, one per expert. Two index tensors describe
the rows: `slots` holds each row's slot, `places` holds each slot's row. Both directions gather by these indices. So a sum has the
same order on every device, by slot and then by etp.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from triaxis.engine.activations.linear_map import mapped
from triaxis.engine.activations.saved_tensors import TensorObserver, unobserved
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import EXPERTS
from triaxis.engine.config.quantities.expert_rows import buffer_rows
from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.device.host_copy import to_device
from triaxis.engine.expert_parallel.routing import Choice, count_values
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.kernels.grouped_gemm import Ends
from triaxis.engine.layout.shard_spec import ExpertPlace
from triaxis.engine.numerics.precision import accumulate

SORTED = torch.int16
"""Dtype of experts' numbers to sort: a radix sort makes a pass for each byte."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows for this rank's experts.

    Attributes:
        rows: expert inputs [R, h], ordered by expert.
        weights: row weights [R], in the accumulation dtype.
        ends: end of each local expert's rows.
        combine: function (row outputs [R, h]) -> outputs for this rank's tokens [T, h].
    """

    rows: torch.Tensor
    weights: torch.Tensor
    ends: Ends
    combine: Callable[[torch.Tensor], torch.Tensor]


class Dispatch(Protocol):
    """One dispatch form.

    `begin` takes the choice for T tokens, and posts the collectives that need only this. It returns a function that dispatches the
    tokens x [T, h] with their weights [T, k].
    """

    def begin(self, choice: Choice) -> Callable[[torch.Tensor, torch.Tensor], Dispatched]: ...


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The ep x etp ranks over which one set of experts is divided.

    Attributes:
        axis: the `experts` axis of these ranks; etp varies fastest.
        place: this rank's ep and etp coordinates, and the sizes ep and etp.
        moe: the model's expert configuration.
        fusion: wrapper that compiles the sums over a token's rows.
        on_overflow: callback for the number of overflowing rows, an int64 scalar on the device.
        on_kept: callback for each index tensor that is kept for a backward.
    """

    axis: Axis
    place: ExpertPlace
    moe: MoEConfig
    fusion: Fusion
    on_overflow: Callable[[torch.Tensor], None]
    on_kept: TensorObserver = unobserved

    @property
    def num_local(self) -> int:
        """Number of experts on this rank."""
        return self.moe.num_experts // self.place.ep

    def keep(self, *indices: torch.Tensor) -> None:
        """Report index tensors to `on_kept` if a backward will need them."""
        if torch.is_grad_enabled():
            for each in indices:
                self.on_kept(each)


def local_numbers(experts: torch.Tensor, place: ExpertPlace, num_local: int) -> torch.Tensor:
    """Map experts' global indices to a rank's 0 .. num_local - 1. Other ranks' experts become `num_local`."""
    local = experts - place.ep_index * num_local
    return local.where((local >= 0) & (local < num_local), num_local)


@dataclass(frozen=True, slots=True)
class KnownRows:
    """Row counts per group member and expert, as numbers on the host.

    Attributes:
        to_members: rows to each member, by the member's local experts, [n][E / ep].
        from_members: rows from each member, by this rank's experts, [n][E / ep].
    """

    to_members: Sequence[Sequence[int]]
    from_members: Sequence[Sequence[int]]

    def ends(self, most: int) -> list[int]:
        """Compute the end of each local expert's rows in a buffer with `most` rows."""
        of_expert = (sum(counts) for counts in zip(*self.from_members, strict=True))
        return [min(end, most) for end in itertools.accumulate(of_expert)]


def sum_rows(rows: torch.Tensor, places: torch.Tensor, fusion: Fusion, *, has_gaps: bool = False) -> torch.Tensor:
    """Sum m of the rows [R, h] for each of N tokens, in the order of `places`.

    The result is [N, h] in the rows' dtype, summed in the accumulation dtype.

    Args:
        places: row indices int64 [N, m]; with `has_gaps`, the index R means no row.
    """
    return fusion(_sum_rows, lengths="rows")(rows, places, has_gaps)


def _sum_rows(rows: torch.Tensor, places: torch.Tensor, has_gaps: bool) -> torch.Tensor:
    first, *others = places.unbind(1)
    total = accumulate(_rows_at(rows, first, has_gaps))
    for place in others:
        total += _rows_at(rows, place, has_gaps)
    return total.to(rows.dtype)


def _rows_at(rows: torch.Tensor, place: torch.Tensor, has_gaps: bool) -> torch.Tensor:
    if not has_gaps:
        return rows.index_select(0, place)
    # Unused rows are uninitialised and may hold NaN, so they are masked rather than multiplied by 0.
    found = rows.index_select(0, place.clamp(max=rows.shape[0] - 1))
    return found.masked_fill_((place == rows.shape[0]).unsqueeze(1), 0)


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


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Row exchange between a group's ranks, from this rank's point of view.

    Attributes:
        axis: the group's axis.
        sent, received: row counts to and from each member.
        slots: index of each sent row's slot, in sending order, int64 [sum(sent)]; each of T tokens has k slots, one per expert.
        places: indices in sending order of each slot's rows, one row per etp rank of the slot's expert, int64 [T k, etp].
        by_expert: permutation from receive order to local-expert order, int64 [sum(received)].
        from_expert: inverse of `by_expert`.
        ends: end of each local expert's rows.
        k: slots per token.
        fusion: wrapper that compiles `sums`.
    """

    axis: Axis
    sent: Sequence[int]
    received: Sequence[int]
    slots: torch.Tensor
    places: torch.Tensor
    by_expert: torch.Tensor
    from_expert: torch.Tensor
    ends: Ends
    k: int
    fusion: Fusion

    @property
    def tokens(self) -> torch.Tensor:
        """Each row's token in sending order, int64 [sum(sent)]."""
        return self.slots // self.k

    def there(self, values: torch.Tensor, purpose: str) -> Pending:
        """Post values in sending order to their experts' ranks, which get them in receive order."""
        return self.axis.all_to_all_rows(values, self.sent, self.received, purpose)

    def back(self, values: torch.Tensor, purpose: str) -> Pending:
        """Post values in receive order back to their tokens' ranks, which get them in sending order."""
        return self.axis.all_to_all_rows(values, self.received, self.sent, purpose)

    def sums(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum each token's rows, given in sending order [sum(sent), h], as [T, h]."""
        return sum_rows(rows, self.places.view(-1, self.k * self.places.shape[1]), self.fusion)

    def slots_from(self, values: torch.Tensor) -> torch.Tensor:
        """Sum row values, in sending order, over an expert's etp ranks: [T, k], one value per token and expert."""
        return sum_rows(values.unsqueeze(1), self.places, EAGER).view(-1, self.k)

    def combine(self, out: torch.Tensor) -> torch.Tensor:
        """Map row outputs [R, h], ordered by expert, to sums over each token's experts [T, h]."""
        ordered = mapped(
            out, lambda x: x.index_select(0, self.from_expert), lambda grad: grad.index_select(0, self.by_expert)
        )
        del out
        returned = mapped(
            ordered,
            lambda x: self.back(x, f"{EXPERTS} forward").wait(),
            lambda grad: self.there(grad, f"{EXPERTS} backward").wait(),
        )
        del ordered
        return mapped(returned, self.sums, lambda grad: grad.index_select(0, self.tokens))


class ExchangeDispatch:
    """Dispatch by all-to-all.

    Attributes:
        known: row counts for a rank that `triaxis.launch.footprint` simulates; None in a training run.
    """

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group
        self.known: KnownRows | None = None

    def begin(self, choice: Choice) -> Callable[[torch.Tensor, torch.Tensor], Dispatched]:
        """Post the exchange of row counts; return the function that dispatches tokens (see `Dispatch`)."""
        group = self._group
        place, num_local = group.place, group.num_local
        # [n, E / ep]: an expert's etp ranks all get the same rows.
        to_members = choice.counts.view(place.ep, num_local).repeat_interleave(place.etp, dim=0)
        posted = group.axis.all_to_all(to_members, f"{EXPERTS} counts")

        def dispatch(x: torch.Tensor, weights: torch.Tensor) -> Dispatched:
            from_members = posted.wait()
            known = self.known
            if known is None:
                both = torch.stack((to_members, from_members))
                with group.axis.ledger.host_read(f"{EXPERTS} counts"):
                    known = KnownRows(*both.tolist())
            else:
                # In a footprint no other rank has sent counts, so the known ones replace those received.
                flat = list(itertools.chain.from_iterable(known.from_members))
                from_members = to_device(flat, from_members.dtype, from_members.device).view_as(from_members)
            exchange = self._plan(choice.experts, known, from_members)
            group.keep(exchange.slots, exchange.places, exchange.by_expert, exchange.from_expert)
            rows, row_weights = _There.apply(x, weights, exchange)
            return Dispatched(rows, row_weights, exchange.ends, exchange.combine)

        return dispatch

    def _plan(self, experts: torch.Tensor, known: KnownRows, from_members: torch.Tensor) -> _Exchange:
        """Plan the rows' sending order, and the permutation that orders received rows by expert.

        `from_members` [n, E / ep] holds the received row counts on the device.
        """
        group = self._group
        sent, received = ([sum(row) for row in rows] for rows in (known.to_members, known.from_members))
        order = experts.flatten().to(SORTED).argsort(stable=True)  # by expert, so also by ep rank
        slots, places = order, torch.arange(len(order), device=order.device).unsqueeze(1)
        if group.place.etp > 1:
            # An ep rank's rows are repeated for each of its etp members, which are neighbours on the axis.
            etp, of_parts = group.place.etp, sent[:: group.place.etp]
            slots = torch.cat([part for part in order.split(of_parts) for _ in range(etp)])
            blocks = torch.arange(len(slots), device=order.device).split([etp * length for length in of_parts])
            places = torch.cat([block.view(etp, -1).t() for block in blocks])
        numbers = torch.arange(sum(received), device=order.device)
        by_expert, from_expert, ends = group.fusion(_orders, lengths="rows")(numbers, from_members.unsqueeze(0))
        return _Exchange(
            axis=group.axis,
            sent=sent,
            received=received,
            slots=slots,
            places=torch.empty_like(places).index_copy_(0, order, places),
            by_expert=by_expert,
            from_expert=from_expert,
            ends=Ends(ends, known.ends(sum(received))),
            k=experts.shape[1],
            fusion=group.fusion,
        )


def _orders(numbers: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Order rows, which arrive by member and then by expert, by expert and then by member.

    Args:
        numbers: 0 .. R - 1, int64 [R].
        counts: rows of each member for each expert, int64 [1, n, E / ep].

    Returns:
        The permutation int64 [R] from receive order to expert order, its inverse, and the experts' ends, int32 [E / ep].
    """
    _, num_members, num_experts = counts.shape
    by_member, by_expert = counts.flatten(), counts[0].t().flatten()
    member_ends, expert_ends = by_member.cumsum(0), by_expert.cumsum(0)
    # A segment is one member's rows for one expert; all its rows move equally far.
    starts = (member_ends - by_member).view(num_members, num_experts)
    moves = starts - (expert_ends - by_expert).view(num_experts, num_members).t()
    to_expert = numbers + moves.t().flatten()[torch.bucketize(numbers, expert_ends, right=True)]
    from_expert = numbers - moves.flatten()[torch.bucketize(numbers, member_ends, right=True)]
    return to_expert, from_expert, expert_ends[num_members - 1 :: num_members].to(torch.int32)


class _There(torch.autograd.Function):
    """Exchange x [T, h], weights [T, k] for rows [R, h], weights [R], by expert. It saves indices only."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, exchange: _Exchange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = exchange
        posted = [
            exchange.there(values.index_select(0, index), f"{EXPERTS} forward")
            for values, index in ((x, exchange.tokens), (weights.flatten(), exchange.slots))
        ]
        rows, row_weights = (each.wait().index_select(0, exchange.by_expert) for each in posted)
        return rows, row_weights

    @staticmethod
    def backward(
        ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        exchange: _Exchange = ctx.exchange
        posted = [
            exchange.back(each.index_select(0, exchange.from_expert), f"{EXPERTS} backward")
            for each in (grad_rows, grad_weights)
        ]
        of_rows, of_slots = (each.wait() for each in posted)
        return exchange.sums(of_rows), exchange.slots_from(of_slots), None
