"""The report of a verification's rank, as JSON between processes (no torch here).

A reference (one process) writes whole tensors; each rank of the layout compares its own parts with them and reports sums. No
rank holds the tensors of another, so the layout may be as large as the machine allows.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.config.optimizer_kinds import STATE_KINDS
from launch.verify.verdict.deviation import NOTHING, Deviation

TensorKind = str
"""One of `KINDS`."""

KINDS: tuple[TensorKind, ...] = ("start", "gradient", *STATE_KINDS, "parameter")
"""In the order in which a step makes them, with the moments of every optimizer.

start: weights before the first step. parameter: what the next forward uses, on every rank that holds a copy."""

REFERENCE_STEPS = "reference.steps.json"
"""File of the one process, with its `StepFacts`."""

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
    num_tokens: int


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
class RankReport:
    """Everything of one rank.

    Attributes:
        coordinates: its place on the axes pp, dp and tp.
        samples: by step, in the order in which they are read.
    """

    rank: int
    coordinates: dict[str, int]
    steps: tuple[StepFacts, ...]
    tensors: tuple[TensorReport, ...]
    sites: tuple[SiteReport, ...]
    samples: tuple[tuple[Sample, ...], ...] = ()

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
