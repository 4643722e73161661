"""Judge the ranks' reports, and find the first difference.

Differences are searched in the order of a step: samples, weights at the start, outputs and expert choices along the model, loss,
gradients, gradient norm, masters and moments, and parameters for the next forward.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from triaxis.launch.verify.verdict.bounds import TOLERANCES, Bounds
from triaxis.launch.verify.verdict.causes import cause_of
from triaxis.launch.verify.verdict.deviation import Deviation
from triaxis.launch.verify.verdict.evidence import Cause, Difference, Evidence, relative, relative_errors
from triaxis.launch.verify.verdict.records import RoutingReport, Sample, StepFacts

__all__ = ["TOLERANCES", "Cause", "Difference", "Evidence", "Verdict", "judge"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a layout. The layout equals its reference if `differences` is empty.

    Attributes:
        largest: (largest `Difference.error`, name of the tensor, site or sample that has it) by `Difference.what`.
        differences: all differences in the first quantity (`Difference.what`) that differs, in order.
        reference: facts about each step of the reference, which is one process.
        of_bound: largest error as a fraction of its bound; at most 1 if equal.
    """

    largest: Mapping[str, tuple[float, str]]
    differences: tuple[Difference, ...]
    cause: Cause | None
    reference: tuple[StepFacts, ...] = ()
    of_bound: float = 0.0

    @property
    def equal(self) -> bool:
        return not self.differences


def judge(evidence: Evidence, tolerance: float | None) -> Verdict:
    """Compare the ranks' reports with the reference, and find the likely cause of a difference.

    Args:
        tolerance: bound for every relative error if the evidence has no measured noise.
    """
    largest: dict[str, tuple[float, str]] = {}
    first: list[Difference] = []
    of_bounds = [0.0]
    bounds = Bounds(evidence, tolerance)

    def look(found: Iterable[Difference]) -> None:
        differing = []
        for one in found:
            if one.error > largest.get(one.what, (-1.0, ""))[0]:
                largest[one.what] = (one.error, one.name)
            of_bounds.append(relative(one.error, one.bound))
            if not one.error <= one.bound:
                differing.append(one)
        if differing and not first:
            first.extend(differing)

    for step, wanted in enumerate(evidence.reference):
        look(_samples(evidence, step))
        routing = list(_routing(evidence, step))
        if step == 0:
            look(_of(step, "start", evidence.tensors.get((0, "start"), {}), bounds.tensors(0, "start")))
            outputs = _of(step, "output", evidence.sites, bounds.sites())
            # A router's choices depend on the layers before it, and later outputs depend on its choices.
            place = _first_wrong_routing(outputs, routing)
            look(outputs[:place])
            look(routing)
            look(outputs[place:])
        else:
            look(routing)
        got = [rank.steps[step] for rank in evidence.ranks]
        look(_scalars(step, "loss", wanted, got, lambda facts: facts.loss, bounds.loss(step)))
        for kind in evidence.kinds(step):
            look(_of(step, kind, evidence.tensors.get((step, kind), {}), bounds.tensors(step, kind)))
            if kind == "gradient":
                look(
                    _scalars(step, "gradient norm", wanted, got, lambda facts: facts.grad_norm, bounds.grad_norm(step))
                )
    cause = cause_of(evidence, first) if first else None
    return Verdict(largest, tuple(first), cause, evidence.reference, max(of_bounds))


def _of(step: int, what: str, tensors: Mapping[str, Deviation], bounds: Mapping[str, float]) -> list[Difference]:
    return [
        Difference(
            step,
            what,
            name,
            tensors[name].wanted_norm,
            tensors[name].got_norm,
            error,
            tensors[name].factor if tensors[name].is_multiple else None,
            bounds[name],
        )
        for name, error in relative_errors(tensors).items()
    ]


def _routing(evidence: Evidence, step: int) -> Iterator[Difference]:
    """Compare expert choices layer by layer.

    In a narrow dtype, any number of differing choices is allowed, since rounding can explain it. Missing, duplicated or misplaced
    tokens never are.
    """
    found: dict[int, RoutingReport] = {}
    for rank in evidence.ranks:
        for one in rank.routings:
            if one.step == step:
                found[one.layer] = found[one.layer] + one if one.layer in found else one
    for wanted in evidence.routings:
        if wanted.step != step:
            continue
        got = found.get(wanted.layer, RoutingReport(step, wanted.layer, 0, 0, 0))
        right = got.num_choices - got.num_flipped
        error = got.num_flipped / wanted.num_choices
        # In a narrow dtype the run uses the reference's choices: any number of flips is rounding, and the digest stays exact.
        bound = 0.0 if evidence.noise is None else math.inf
        if (got.digest, got.num_choices) != (wanted.digest, wanted.num_choices):
            # Tokens are missing, duplicated or misplaced; flips do not show this.
            missing = abs(got.num_choices - wanted.num_choices) / wanted.num_choices
            error, bound = max(error, missing, 1 / wanted.num_choices), 0.0
        yield Difference(step, "routing", f"layers.{wanted.layer}.mlp", wanted.num_choices, right, error, None, bound)


def _first_wrong_routing(outputs: Sequence[Difference], routing: Sequence[Difference]) -> int:
    """Return the index in `outputs` of the first layer whose routing exceeds its bound.

    The result is `len(outputs)` if there is none.
    """
    wrong = next((one.name for one in routing if not one.error <= one.bound), None)
    return next((place for place, one in enumerate(outputs) if one.name == wrong), len(outputs))


def _scalars(
    step: int,
    what: str,
    wanted: StepFacts,
    got: Sequence[StepFacts],
    value: Callable[[StepFacts], float],
    bound: float,
) -> list[Difference]:
    """Compare a scalar with the reference's on each rank, and return the largest difference."""
    expected = value(wanted)
    worst = max((value(facts) for facts in got), key=lambda number: _distance(number, expected))
    factor = worst / expected if expected else None
    error = relative(_distance(worst, expected), abs(expected))
    return [Difference(step, what, "", expected, worst, error, factor, bound)]


def _distance(number: float, expected: float) -> float:
    """Distance between two scalars, infinite if `number` is not finite."""
    return abs(number - expected) if math.isfinite(number) else math.inf


OTHER_CONTENTS = "other tokens, labels, mask, positions or documents"


def _samples(evidence: Evidence, step: int) -> Iterator[Difference]:
    """Compare how often each dp group and the reference read each sample of the step.

    Yield one difference per sample, from the group that differs most. Nothing is yielded if the reference recorded no samples.
    """
    if not evidence.samples:
        return
    wanted = Counter(evidence.samples[step])
    places: dict[tuple[int, ...], Counter[Sample]] = {}
    for rank in evidence.ranks:
        place = tuple(at for axis, at in sorted(rank.coordinates.items()) if axis != "dp")
        places.setdefault(place, Counter()).update(rank.samples[step])
    worst: dict[Sample, int] = {}
    for read in places.values():
        for sample in wanted | read:
            if abs(read[sample] - wanted[sample]) >= abs(worst.get(sample, wanted[sample]) - wanted[sample]):
                worst[sample] = read[sample]
    for sample, times in sorted(worst.items()):
        is_known = sample in wanted
        name = f"sample {sample[0]}" if is_known else f"{OTHER_CONTENTS} of sample {sample[0]}"
        yield Difference(step, "samples", name, wanted[sample], times, abs(times - wanted[sample]), None)
