"""Dispatch in which ranks exchange the rows of each other's experts by all-to-all."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from triaxis.engine.activations.linear_map import mapped
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import EXPERTS
from triaxis.engine.device.host_copy import to_device
from triaxis.engine.expert_parallel.dispatch import SORTED, Dispatched, ExpertGroup, KnownRows, sum_rows
from triaxis.engine.expert_parallel.routing import Choice
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.kernels.grouped_gemm import Ends


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
