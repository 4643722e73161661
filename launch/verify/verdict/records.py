"""Define the report that each rank of a verification writes, as JSON.

The reference (one process) writes whole tensors. Each rank of the layout compares its own parts with them. The rank reports sums
over its elements (`Deviation`), such as the sum of squared errors.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from triaxis.launch.verify.verdict.deviation import NOTHING, Deviation

TensorKind = str
"""`gradient`, an optimizer state's kind, or one of these two:

start: weights before the first step. parameter: weights for the next forward, on every rank that holds a copy."""

REFERENCE_STEPS = "reference.steps.json"
"""The one process's file with its `StepFacts`."""

REFERENCE_DIGESTS = "reference.digests.json"
"""The one process's file with its `RoutingReport`s."""

REFERENCE_SAMPLES = "reference.samples.json"
"""The one process's file with the samples of its steps, as in `RankReport.samples`."""

NOISE_REPORT = "noise.json"
"""The file of one process in a wider dtype, with its `RankReport`: the reference's rounding."""

Sample = tuple[int, int]
"""A sample's id, and a checksum over its tokens, labels, mask, positions and documents."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Values that all ranks agree on after a step.

    Attributes:
        loss: mean loss of the counted labels, in nats.
        grad_norm: gradient norm before clipping.
        num_tokens: number of labels in the global batch that count in the loss.
    """

    loss: float
    grad_norm: float
    num_tokens: float


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor in one step on one rank. `deviation` compares the parts that the rank holds with the reference's."""

    step: int
    kind: TensorKind
    name: str
    deviation: Deviation


@dataclass(frozen=True, slots=True)
class SiteReport:
    """The output of one site during the first step's forward, on one rank.

    Attributes:
        order: position along the model.
        name: site name, such as `layers.3.attention`.
        deviation: sums over the rank's tokens in all microbatches.
    """

    order: int
    name: str
    deviation: Deviation


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """The expert choices in one layer and one step, on one rank (`launch/verify/routing.py`).

    Attributes:
        num_choices: choices of all tokens that are routed here, k each.
        num_flipped: choices that the reference did not make for the same token.
        digest: sum of hashes over tokens and experts, an int64. Ranks' digests add up modulo 2^64.
    """

    step: int
    layer: int
    num_choices: int
    num_flipped: int
    digest: int

    def __add__(self, other: "RoutingReport") -> "RoutingReport":
        digest = (self.digest + other.digest + 2**63) % 2**64 - 2**63
        return RoutingReport(
            self.step,
            self.layer,
            self.num_choices + other.num_choices,
            self.num_flipped + other.num_flipped,
            digest,
        )


@dataclass(frozen=True, slots=True)
class RankReport:
    """Everything that one rank reports.

    Attributes:
        coordinates: the rank's index on each of the axes pp, dp, cp and tp.
        experts: the rank's index on each of edp, ep and etp.
        samples: samples by step, in reading order.
        routings: reports for the rank's expert layers.
    """

    rank: int
    coordinates: dict[str, int]
    steps: tuple[StepFacts, ...]
    tensors: tuple[TensorReport, ...]
    sites: tuple[SiteReport, ...]
    samples: tuple[tuple[Sample, ...], ...] = ()
    experts: dict[str, int] = field(default_factory=dict)
    routings: tuple[RoutingReport, ...] = ()

    def place(self, axis: str) -> dict[str, int]:
        """The rank's index on each axis of the mesh that has `axis`.

        For pp, dp, cp and tp: `coordinates`. For edp, ep and etp: the pp index and `experts`.
        """
        if axis in self.coordinates:
            return self.coordinates
        return {"pp": self.coordinates["pp"], **self.experts}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "RankReport":
        tree = json.loads(path.read_text())
        return cls(
            tree["rank"],
            tree["coordinates"],
            tuple(StepFacts(**step) for step in tree["steps"]),
            tuple(
                TensorReport(one["step"], one["kind"], one["name"], Deviation(**one["deviation"]))
                for one in tree["tensors"]
            ),
            tuple(SiteReport(one["order"], one["name"], Deviation(**one["deviation"])) for one in tree["sites"]),
            samples_of(tree["samples"]),
            tree["experts"],
            tuple(RoutingReport(**one) for one in tree["routings"]),
        )


def samples_of(steps: Iterable[Iterable[Iterable[int]]]) -> tuple[tuple[Sample, ...], ...]:
    """Restore the samples of all steps from JSON."""
    return tuple(tuple((int(number), int(checksum)) for number, checksum in step) for step in steps)


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """One parameter in a layout.

    Attributes:
        decay: whether weight decay applies.
        stage: index of the first stage that has the parameter.
    """

    name: str
    decay: bool
    stage: int


def together(deviations: Iterable[Deviation]) -> Deviation:
    """Add up the deviations of a tensor's parts. A replicated part counts once for each rank that holds it."""
    return sum(deviations, NOTHING)
