"""Reports of ranks and sub-layouts, and the record of a difference."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from triaxis.engine.config.extension import NOT_MOMENTS
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
"""`SublayoutVerdict.change` of the run without any axis: the reference's own layout, once more."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs.

    Attributes:
        step: counted from 0.
        what: a tensor kind, `samples`, `routing`, `output`, `loss` or `gradient norm`.
        name: of the parameter, the place or the sample; empty for scalars.
        wanted, got: norms, or the scalars themselves; of a sample, how often it is read; of a routing, experts of all tokens
            and those of them that the reference has chosen.
        error: of the difference, relative to `wanted` or to the tensor's share of all.
        factor: what was got is this multiple of what was wanted and nothing else; None where it is no multiple.
        bound: the largest error that is rounding.
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
    """An axis that measurements name (None: they name none), and what was measured."""

    axis: str | None
    text: str


@dataclass(frozen=True, slots=True)
class SublayoutVerdict:
    """The verdict about a sub-layout: the same run with one thing taken out.

    Attributes:
        change: such as `tp=1`.
        axis: the axis of ranks that is taken out; None: something else is.
        equal: None where the run did not end well.
    """

    change: str
    axis: str | None
    equal: bool | None


@dataclass(frozen=True)
class Evidence:
    """Everything that ranks and sub-layouts reported.

    Attributes:
        parameters: what it does with each parameter, in forward order.
        reference: the steps of the one process.
        ranks: the reports of the layout.
        samples: of the one process's steps; empty: the reference has not written them.
        noise: the report of one process in a wider dtype; None: the bound is a constant.
        routings: the one process's choices of experts; empty: the reference has not written them.
        are_whole: each rank reports whole gradients, so those of dp ranks can be parts of a sum; ours are then owned parts.
    """

    sizes: ParallelSizes
    sequence_parallel: bool
    parameters: tuple[ParameterFacts, ...]
    reference: tuple[StepFacts, ...]
    ranks: tuple[RankReport, ...]
    samples: tuple[tuple[Sample, ...], ...] = ()
    noise: RankReport | None = None
    routings: tuple[RoutingReport, ...] = ()
    are_whole: bool = False

    @cached_property
    def tensors(self) -> dict[tuple[int, TensorKind], dict[str, Deviation]]:
        """Return every tensor over all ranks, in forward order, by step and kind."""
        return self._tensors(self.ranks)

    def kinds(self, step: int) -> list[TensorKind]:
        """Return the kinds that a step makes, in its order; moments have the names that their optimizer gives them."""
        moments = [kind for at, kind in self.tensors if at == step and kind not in NOT_MOMENTS]
        return [*NOT_MOMENTS[1:3], *moments, *NOT_MOMENTS[3:]]

    @cached_property
    def sites(self) -> dict[str, Deviation]:
        """Return outputs of the first forward over all ranks, along the model."""
        return _sites(self.ranks)

    @cached_property
    def noise_tensors(self) -> dict[tuple[int, TensorKind], dict[str, Deviation]]:
        """Return the tensors of the one process in a wider dtype, as `tensors` does."""
        assert self.noise is not None
        return self._tensors((self.noise,))

    @cached_property
    def noise_sites(self) -> dict[str, Deviation]:
        """Return the outputs of the one process in a wider dtype, as `sites` does."""
        assert self.noise is not None
        return _sites((self.noise,))

    def _tensors(self, ranks: tuple[RankReport, ...]) -> dict[tuple[int, TensorKind], dict[str, Deviation]]:
        parts: dict[tuple[int, TensorKind], dict[str, list[Deviation]]] = {}
        for rank in ranks:
            for one in rank.tensors:
                parts.setdefault((one.step, one.kind), {}).setdefault(one.name, []).append(one.deviation)
        order = {facts.name: place for place, facts in enumerate(self.parameters)}
        return {
            key: {name: together(found[name]) for name in sorted(found, key=order.__getitem__)}
            for key, found in parts.items()
        }


def _sites(ranks: tuple[RankReport, ...]) -> dict[str, Deviation]:
    parts: dict[tuple[int, str], list[Deviation]] = {}
    for rank in ranks:
        for site in rank.sites:
            parts.setdefault((site.order, site.name), []).append(site.deviation)
    return {name: together(parts[order, name]) for order, name in sorted(parts)}


def relative_errors(tensors: Mapping[str, Deviation]) -> dict[str, float]:
    """Return errors relative to the tensor, or to its share of all: a gradient that is zero in theory is rounding in practice."""
    share = math.sqrt(sum(one.wanted_square for one in tensors.values()) / max(1, len(tensors)))
    return {name: relative(one.error, max(one.wanted_norm, share)) for name, one in tensors.items()}


def relative(error: float, scale: float) -> float:
    """Return `error` / `scale`; of nothing, 0 where there is no error and infinity where there is one."""
    return error / scale if scale else (0.0 if error == 0 else math.inf)
