"""The report of a verification's rank, as JSON between processes.

A reference (one process) writes whole tensors; each rank of the layout compares its own parts with them and reports sums. No
rank holds the tensors of another, so the layout may be as large as the machine allows.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from triaxis.launch.verify.verdict.deviation import NOTHING, Deviation

TensorKind = str
"""`gradient`, a kind of optimizer state, or one of these two:

start: weights before the first step. parameter: what the next forward uses, on every rank that holds a copy."""

REFERENCE_STEPS = "reference.steps.json"
"""File of the one process, with its `StepFacts`."""

REFERENCE_DIGESTS = "reference.digests.json"
"""File of the one process, with its `RoutingReport`s."""

REFERENCE_SAMPLES = "reference.samples.json"
"""File of the one process, with the samples of its steps, as `RankReport.samples`."""

NOISE_REPORT = "noise.json"
"""File of the one process in a wider dtype, with its `RankReport`: the rounding of the reference."""

Sample = tuple[int, int]
"""The id of a sample, and a checksum of its tokens, labels, mask, positions and documents."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Values that all ranks agree on after a step: loss per token in nats, gradient norm before clipping, counted tokens."""

    loss: float
    grad_norm: float
    num_tokens: float


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor of one step on one rank, its parts together."""

    step: int
    kind: TensorKind
    name: str
    deviation: Deviation


@dataclass(frozen=True, slots=True)
class SiteReport:
    """The output of one place of the model in the first step's forward, on one rank.

    Attributes:
        order: along the model.
        name: such as `layers.3.attention`.
    """

    order: int
    name: str
    deviation: Deviation


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """The choices of experts of one layer in one step, on one rank (`launch/verify/routing.py`).

    Attributes:
        num_choices: experts of all tokens that were routed here, k each.
        num_flipped: of these, experts that the reference has not chosen for the token.
        digest: of tokens and experts, an int64 that adds up over ranks modulo 2^64.
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
    """Everything of one rank.

    Attributes:
        coordinates: its place on the axes pp, dp, cp and tp.
        experts: the same rank's place on edp, ep and etp.
        samples: by step, in the order in which they are read.
        routings: of its layers with experts.
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
        """Return the coordinates among which an axis is: those of the mesh, or those of experts with the stage."""
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
    """Return the samples of steps as they were before they became JSON."""
    return tuple(tuple((int(number), int(checksum)) for number, checksum in step) for step in steps)


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """The layout's treatment of a parameter: the axis of its replicas, and the axis over which their gradients are summed."""

    name: str
    replicas: str | None
    sum_over: str | None
    decay: bool
    tied_ends: bool
    stage: int


def together(deviations: Iterable[Deviation]) -> Deviation:
    """Add up the parts of a tensor. Replicas count as often as they are held, in what is wanted and in what was got."""
    return sum(deviations, NOTHING)
