"""From what ranks saw to a verdict: equal, or the first thing that differs, where, and what usually does that (no torch here).

The order of a step is the order of the search: weights at the start, outputs along the model, loss, gradients, their norm,
masters and moments, the parameters that the next forward uses. What comes later differs because of what came before.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from engine.rank_grid import ParallelSizes
from engine.verify.deviation import Deviation
from engine.verify.records import KINDS, ParameterFacts, RankReport, StepFacts, TensorKind, together

TOLERANCES = {"float64": 1e-9, "fp32": 1e-3, "bf16": 0.1}
"""Largest error of a tensor relative to its norm, or to its share of the norm of all: rounding after a few steps of Adam."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs.

    Attributes:
        step: counted from 0.
        what: a tensor kind, `output`, `loss` or `gradient norm`.
        name: of the parameter or the place; empty for scalars.
        wanted, got: norms, or the scalars themselves.
        error: of the difference, relative to `wanted` or to the tensor's share of all.
        factor: what was got is this multiple of what was wanted and nothing else; None where it is no multiple.
    """

    step: int
    what: str
    name: str
    wanted: float
    got: float
    error: float
    factor: float | None


@dataclass(frozen=True, slots=True)
class Cause:
    """A guess: the axis along which something went wrong (None: none), and what it looks like."""

    axis: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome; equal where `differences` is empty.

    Attributes:
        largest: for every kind compared, the largest relative error and whose it was.
        differences: all of the first kind that differs, the first of them first.
        reference: the steps of the one process.
    """

    largest: Mapping[str, tuple[float, str]]
    differences: tuple[Difference, ...]
    cause: Cause | None
    reference: tuple[StepFacts, ...] = ()

    @property
    def equal(self) -> bool:
        return not self.differences


@dataclass(frozen=True)
class Evidence:
    """Everything that was seen.

    Attributes:
        sizes, sequence_parallel: the layout.
        parameters: what it does with each parameter, in forward order.
        reference: the steps of the one process.
        ranks: the reports of the layout.
    """

    sizes: ParallelSizes
    sequence_parallel: bool
    parameters: tuple[ParameterFacts, ...]
    reference: tuple[StepFacts, ...]
    ranks: tuple[RankReport, ...]

    @cached_property
    def tensors(self) -> dict[tuple[int, TensorKind], dict[str, Deviation]]:
        """By step and kind: every tensor over all ranks, in forward order."""
        parts: dict[tuple[int, TensorKind], dict[str, list[Deviation]]] = {}
        for rank in self.ranks:
            for one in rank.tensors:
                parts.setdefault((one.step, one.kind), {}).setdefault(one.name, []).append(one.deviation)
        order = {facts.name: place for place, facts in enumerate(self.parameters)}
        return {
            key: {name: together(found[name]) for name in sorted(found, key=order.__getitem__)}
            for key, found in parts.items()
        }

    @cached_property
    def sites(self) -> dict[str, Deviation]:
        """Outputs of the first forward over all ranks, along the model."""
        parts: dict[tuple[int, str], list[Deviation]] = {}
        for rank in self.ranks:
            for site in rank.sites:
                parts.setdefault((site.order, site.name), []).append(site.deviation)
        return {name: together(parts[order, name]) for order, name in sorted(parts)}


def judge(evidence: Evidence, tolerance: float) -> Verdict:
    """Search for the first difference, and guess its cause."""
    largest: dict[str, tuple[float, str]] = {}
    first: list[Difference] = []

    def look(found: Iterable[Difference]) -> None:
        differing = []
        for one in found:
            if one.error > largest.get(one.what, (-1.0, ""))[0]:
                largest[one.what] = (one.error, one.name)
            if not one.error <= tolerance:
                differing.append(one)
        if differing and not first:
            first.extend(differing)

    for step, wanted in enumerate(evidence.reference):
        if step == 0:
            look(_tensors(evidence, step, "start"))
            look(_of(step, "output", evidence.sites))
        got = [rank.steps[step] for rank in evidence.ranks]
        look(_scalars(step, "loss", wanted, got, lambda facts: facts.loss))
        look(_tensors(evidence, step, "gradient"))
        look(_scalars(step, "gradient norm", wanted, got, lambda facts: facts.grad_norm))
        for kind in KINDS[2:]:
            look(_tensors(evidence, step, kind))
    cause = _cause(evidence, first) if first else None
    return Verdict(largest, tuple(first), cause, evidence.reference)


def _tensors(evidence: Evidence, step: int, kind: TensorKind) -> list[Difference]:
    return _of(step, kind, evidence.tensors.get((step, kind), {}))


def _of(step: int, what: str, tensors: Mapping[str, Deviation]) -> list[Difference]:
    """Errors relative to the tensor, or to its share of all: a gradient that is zero in theory is rounding in practice."""
    share = math.sqrt(sum(one.wanted_square for one in tensors.values()) / max(1, len(tensors)))
    return [
        Difference(
            step,
            what,
            name,
            one.wanted_norm,
            one.got_norm,
            _relative(one.error, max(one.wanted_norm, share)),
            one.factor if one.is_multiple else None,
        )
        for name, one in tensors.items()
    ]


def _scalars(
    step: int, what: str, wanted: StepFacts, got: Sequence[StepFacts], value: Callable[[StepFacts], float]
) -> list[Difference]:
    """The worst rank's."""
    expected = value(wanted)
    worst = max((value(facts) for facts in got), key=lambda number: abs(number - expected))
    factor = worst / expected if expected else None
    return [Difference(step, what, "", expected, worst, _relative(abs(worst - expected), abs(expected)), factor)]


def _relative(error: float, scale: float) -> float:
    return error / scale if scale else (0.0 if error == 0 else math.inf)


# What it looks like ------------------------------------------------------------------------------------------------------


def _cause(evidence: Evidence, differing: Sequence[Difference]) -> Cause:
    first = differing[0]
    if first.what == "start":
        return Cause(
            None, "initial weights depend on the layout: a parameter is drawn from its part, not from the whole tensor"
        )
    if first.what == "output":
        return _cause_in_forward(evidence, first)
    if first.what == "loss":
        return _cause_in_loss(evidence, first)
    if first.what == "gradient":
        return _cause_in_gradients(evidence, differing)
    if first.what == "gradient norm":
        return Cause(
            _axis_of_replicas(evidence),
            f"every gradient is right and their norm is {_times(first.factor)} what it should be: replicas of a parameter are "
            "counted more than once, or an owned part not at all; clipping then scales every update",
        )
    if first.what == "parameter":
        return Cause(
            "dp",
            "masters are right and the weights that the next forward uses are not: the all-gather after the update is missing, "
            "or ran before the owner had written its part",
        )
    return _cause_in_update(evidence, differing)


def _cause_in_forward(evidence: Evidence, first: Difference) -> Cause:
    sites = list(evidence.sites)
    place = sites.index(first.name)
    if first.name == "token_losses":
        return Cause(
            "tp",
            "every hidden state is right and the tokens' losses are not: the columns of the head, padded rows of the vocabulary "
            "in the softmax, or labels of another microbatch",
        )
    if first.name == "loss":
        return Cause(
            None,
            "every token's loss is right and their sum over a microbatch is not: the mask of another microbatch, or a mean over "
            "the counted tokens of the microbatch where the global batch is to be divided once",
        )
    if place and _begins_a_stage(evidence, first.name):
        return Cause(
            "pp",
            f"what {sites[place - 1]} gave is right, and {first.name}, the first place of the next stage, did not compute from it: "
            "microbatches or chunks of the pipeline are in another order than their inputs",
        )
    if evidence.sizes.tp == 1:
        return Cause(
            "dp", f"{first.name} is the first wrong output, and its inputs are right: samples differ between dp ranks"
        )
    what = {
        "attention": "heads, positions (RoPE) or dropout of a rank's part",
        "mlp": "columns, or the sum of the row-parallel output",
        "embedding": "rows of the vocabulary, or positions of a rank's part of the sequence",
    }.get(first.name.rsplit(".", 1)[-1], "dropout or residual of a rank's part of the sequence")
    return Cause("tp", f"{first.name} is the first wrong output, and its inputs are right: {what}")


def _begins_a_stage(evidence: Evidence, site: str) -> bool:
    """Whether a site is of the first layer of a stage that has a stage before it."""
    layer = ".".join(site.split(".")[:2])
    stages = {".".join(facts.name.split(".")[:2]): facts.stage for facts in evidence.parameters}
    before = [stages[name] for name in dict.fromkeys(stages)]
    names = list(dict.fromkeys(stages))
    return any(
        name == layer and after != previous for (previous, after), name in zip(pairwise(before), names[1:], strict=True)
    )


def _cause_in_loss(evidence: Evidence, first: Difference) -> Cause:
    axis = _axis_of_factor(evidence, first.factor)
    return Cause(
        axis,
        f"the outputs are right, and the loss of the global batch is {_times(first.factor)} what it should be: ranks that count "
        "the same tokens are added, or a mean of means is taken over microbatches with unequal masks",
    )


def _cause_in_gradients(evidence: Evidence, differing: Sequence[Difference]) -> Cause:
    facts = {one.name: one for one in evidence.parameters}
    wrong = [facts[one.name] for one in differing]
    factors = {round(one.factor, 3) for one in differing if one.factor is not None}
    all_wrong = len(wrong) == len(facts)
    if all_wrong and len(factors) == 1 and all(one.factor is not None for one in differing):
        (factor,) = factors
        return Cause(
            _axis_of_factor(evidence, factor),
            f"every gradient is {_times(factor)} what it should be: the loss is scaled twice or not at all, or a mean is "
            "taken where a sum belongs (or the other way round)",
        )
    for axis in ("tp", "kv_replicas", "ends"):
        if all(one.sum_over == axis for one in wrong):
            mesh_axis = "pp" if axis == "ends" else "tp"
            holders = {
                "tp": "each tp rank has only its part of this gradient",
                "kv_replicas": "the tp ranks that hold the same key/value head each have their query heads' part",
                "ends": "the first and the last stage each have their use's part",
            }[axis]
            return Cause(mesh_axis, f"{holders}: the parts are not added over {axis}, or added twice")
    if all_wrong:
        return Cause(
            None, "loss and outputs are right and every gradient is wrong: the backward of the head or of the loss"
        )
    return Cause(
        "dp",
        "single gradients are wrong in a way that no factor explains: reduced before the last microbatch was added, or an owned "
        "part that another rank's sum went to",
    )


def _cause_in_update(evidence: Evidence, differing: Sequence[Difference]) -> Cause:
    facts = {one.name: one for one in evidence.parameters}
    kind = differing[0].what
    if kind == "master" and all(not facts[one.name].decay for one in differing):
        return Cause(
            None, "gradients and their norm are right, and only weights without decay are not: decay on norms or biases"
        )
    return Cause(
        "dp",
        f"gradients and their norm are right and {kind} is not: masters that do not follow the weights, another learning rate "
        "or bias correction, or decay on the wrong weights",
    )


def _axis_of_factor(evidence: Evidence, factor: float | None) -> str | None:
    """The axis whose size (or its inverse) the factor is."""
    if factor is None:
        return None
    for axis in ("dp", "tp", "pp"):
        size = evidence.sizes.size(axis)
        if size > 1 and any(math.isclose(factor, wanted, rel_tol=1e-3) for wanted in (size, 1 / size)):
            return axis
    return None


def _axis_of_replicas(evidence: Evidence) -> str | None:
    if any(facts.replicas == "tp" for facts in evidence.parameters) and evidence.sizes.tp > 1:
        return "tp"
    return "pp" if evidence.sizes.pp > 1 else "dp"


def _times(factor: float | None) -> str:
    return "not a multiple of" if factor is None else f"{factor:.4g} times"
