"""Collect the reports from ranks and sub-layouts, and record each difference."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from triaxis.engine.config.schema.extension_parts import NOT_MOMENTS
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.launch.verify.verdict.deviation import Deviation
from triaxis.launch.verify.verdict.records import (
    ParameterFacts,
    RankReport,
    RoutingReport,
    Sample,
    StepFacts,
    TensorKind,
    together,
)

ALONE = "one process"
"""Value of `SublayoutVerdict.change` if the reference's own layout, one process, runs once more."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One compared quantity and its error.

    Attributes:
        step: step, from 0.
        what: kind of tensor (`TensorKind`), or `samples`, `routing`, `output`, `loss` or `gradient norm`.
        name: name of the parameter, site (recorded output, such as `layers.3.mlp`) or sample; empty for scalars.
        wanted, got: norms of the tensor, or the scalars themselves. For a sample: how often it is read. For a routing: how many
            expert choices there are, and how many of them the reference made too.
        error: norm of the difference, relative to `wanted`, or to the root mean square of all tensors' norms if that is larger.
            For a scalar: relative to `wanted`. For a sample: difference in reads. For a routing: share of differing choices.
        factor: f if `got` is f x wanted in every element; None otherwise.
        bound: largest error that rounding explains.
    """

    step: int
    what: str
    name: str
    wanted: float
    got: float
    error: float
    factor: float | None
    bound: float = 0.0


@dataclass(frozen=True, slots=True)
class Cause:
    """The likely cause of a difference: an axis, and a text on the measurements. `axis` None: they name no axis."""

    axis: str | None
    text: str


@dataclass(frozen=True, slots=True)
class SublayoutVerdict:
    """The verdict on a sub-layout, the same run without one axis or feature.

    Attributes:
        change: change to the run, such as `tp=1`.
        axis: removed axis; None: a feature was removed.
        equal: whether the results equal the reference's; None: the run failed.
    """

    change: str
    axis: str | None
    equal: bool | None


@dataclass(frozen=True)
class Evidence:
    """Everything that ranks and sub-layouts reported.

    Attributes:
        parameters: facts about each parameter in the layout, in forward order.
        reference: facts about each step of the reference, which is one process.
        ranks: the layout's reports.
        samples: samples that the reference read, by step; may be empty.
        noise: report from one process in a wider dtype, which measures rounding; None: the bound is a constant.
        routings: the reference's expert choices; may be empty.
        are_whole: True: ranks report whole gradients, which may be partial sums on dp ranks. False: each rank reports the parts
            that it owns, as ours do.
    """

    sizes: ParallelSizes
    parameters: tuple[ParameterFacts, ...]
    reference: tuple[StepFacts, ...]
    ranks: tuple[RankReport, ...]
    samples: tuple[tuple[Sample, ...], ...] = ()
    noise: RankReport | None = None
    routings: tuple[RoutingReport, ...] = ()
    are_whole: bool = False

    @cached_property
    def tensors(self) -> dict[tuple[int, TensorKind], dict[str, Deviation]]:
        """Deviation of each tensor by (step, kind), then by name in forward order. The ranks' parts are added up."""
        parts: dict[tuple[int, TensorKind], dict[str, list[Deviation]]] = {}
        for rank in self.ranks:
            for one in rank.tensors:
                parts.setdefault((one.step, one.kind), {}).setdefault(one.name, []).append(one.deviation)
        order = {facts.name: place for place, facts in enumerate(self.parameters)}
        return {
            key: {name: together(found[name]) for name in sorted(found, key=order.__getitem__)}
            for key, found in parts.items()
        }

    def kinds(self, step: int) -> list[TensorKind]:
        """List the kinds of tensors that a step computes, in the order of their computation."""
        moments = [kind for at, kind in self.tensors if at == step and kind not in NOT_MOMENTS]
        return [*NOT_MOMENTS[1:3], *moments, *NOT_MOMENTS[3:]]

    @cached_property
    def sites(self) -> dict[str, Deviation]:
        """Deviation of each site (recorded output) in the first forward, in model order. Ranks' parts are added up."""
        parts: dict[tuple[int, str], list[Deviation]] = {}
        for rank in self.ranks:
            for site in rank.sites:
                parts.setdefault((site.order, site.name), []).append(site.deviation)
        return {name: together(parts[order, name]) for order, name in sorted(parts)}


def relative_errors(tensors: Mapping[str, Deviation]) -> dict[str, float]:
    """Divide each tensor's error by a scale.

    The scale is the tensor's norm, or the root mean square of all norms if that is larger.
    """
    share = math.sqrt(sum(one.wanted_square for one in tensors.values()) / max(1, len(tensors)))
    return {name: relative(one.error, max(one.wanted_norm, share)) for name, one in tensors.items()}


def relative(error: float, scale: float) -> float:
    """Compute `error` / `scale`. If both are 0, the result is 0. If only the scale is 0, the result is infinity."""
    return error / scale if scale else (0.0 if error == 0 else math.inf)
