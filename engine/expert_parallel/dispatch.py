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
from typing import Protocol

import torch

from triaxis.engine.activations.saved_tensors import TensorObserver, unobserved
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.config.schema.moe import MoEConfig
from triaxis.engine.expert_parallel.routing import Choice
from triaxis.engine.kernels.fusion import Fusion
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
