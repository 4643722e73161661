"""The load of experts in a step, as numbers per layer (no torch here).

    tokens of the global batch that chose each expert, by layer   ->   LoadMeter   ->   ExpertsRecord   ->   line, files, page

    max over mean    the fullest expert's tokens over the mean: 1 is even, E / k is a layer in which k experts do all the work
    entropy          -sum p ln p / ln E of the shares p of the load: 1 is even, 0 is all on one expert

The counts themselves are large (layers x E), so at most about `MOST_COUNTS` records of a run have them: those of the steps since
the record before that had them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from triaxis.engine.config.tree import Config

MOST_COUNTS = 100
"""Records of a run that have the counts."""

_DIGITS = 4
"""Digits of ratios in files."""


def max_over_mean(counts: Sequence[int]) -> float:
    """Return the largest count over the mean; NaN where all are zero."""
    total = sum(counts)
    return max(counts) * len(counts) / total if total else math.nan


def entropy(counts: Sequence[int]) -> float:
    """Return the entropy of the shares over that of even ones, 0 to 1; NaN where all counts are zero."""
    total = sum(counts)
    if not total:
        return math.nan
    shares = [count / total for count in counts if count]
    return abs(sum(share * math.log(share) for share in shares)) / math.log(len(counts))


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """Tokens that chose each expert, added over some steps.

    Attributes:
        first_step, last_step: from 1; both are counted.
        counts: by layer with experts, then by expert.
    """

    first_step: int
    last_step: int
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ExpertsRecord:
    """The load of the experts in one step.

    Attributes:
        layers: numbers of the layers with experts, from 0, as in names of parameters.
        load_max_over_mean: of each of them.
        entropy: of each of them.
        dropped: rows of tokens that found no room; such a step has updated nothing.
        since: the counts; None on most steps.
    """

    layers: tuple[int, ...]
    load_max_over_mean: tuple[float, ...]
    entropy: tuple[float, ...]
    dropped: int
    since: ExpertCounts | None = None

    @property
    def worst(self) -> tuple[float, int]:
        """Return (max over mean, layer) of the layer with the most uneven load; of equal ones the first."""
        place = max(range(len(self.layers)), key=lambda at: self.load_max_over_mean[at])
        return self.load_max_over_mean[place], self.layers[place]

    def __str__(self) -> str:
        """Return the line: `experts load max/mean 1.18 (layer 7), dropped 0`."""
        ratio, layer = self.worst
        return f"experts load max/mean {ratio:.2f} (layer {layer}), dropped {self.dropped:,}"

    def to_record(self) -> dict[str, Any]:
        """Return a JSON object; the fields of `since` are in it where there are counts."""
        record: dict[str, Any] = {
            "layers": list(self.layers),
            "load_max_over_mean": [round(ratio, _DIGITS) for ratio in self.load_max_over_mean],
            "entropy": [round(each, _DIGITS) for each in self.entropy],
            "dropped": self.dropped,
        }
        if self.since is not None:
            record["first_step"], record["last_step"] = self.since.first_step, self.since.last_step
            record["counts"] = [list(layer) for layer in self.since.counts]
        return record


@dataclass
class LoadMeter:
    """The maker of a run's `ExpertsRecord`.

    Attributes:
        layers: numbers of the layers with experts.
        num_steps: of the whole run.
        log_interval: steps between lines.
    """

    layers: tuple[int, ...]
    num_steps: int
    log_interval: int
    _first_step: int | None = field(default=None, init=False)
    _counts: list[list[int]] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, config: Config, num_steps: int) -> "LoadMeter | None":
        """Make that of a configuration; None where the model has no experts."""
        layers = config.model.expert_layers
        return cls(layers, num_steps, config.telemetry.log_interval) if layers else None

    def begin(self) -> None:
        """Forget the counts so far: the run starts, or goes back."""
        self._first_step, self._counts = None, []

    def has_counts(self, step: int) -> bool:
        """Return whether the record of a step, counted from 1, has the counts: some steps with a line, and the last."""
        every = self.log_interval * max(1, math.ceil(self.num_steps / (MOST_COUNTS * self.log_interval)))
        return step % every == 0 or step == self.num_steps

    def measure(self, step: int, load: Sequence[Sequence[int]], dropped: int) -> ExpertsRecord:
        """Make the record of a step, counted from 1, from its load [layers][E] and its rows that found no room."""
        if self._first_step is None:
            self._first_step, self._counts = step, [[0] * len(counts) for counts in load]
        for total, counts in zip(self._counts, load, strict=True):
            total[:] = map(sum, zip(total, counts, strict=True))
        since = None
        if self.has_counts(step):
            since = ExpertCounts(self._first_step, step, tuple(map(tuple, self._counts)))
            self.begin()
        return ExpertsRecord(self.layers, tuple(map(max_over_mean, load)), tuple(map(entropy, load)), dropped, since)
