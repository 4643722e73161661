"""Records how many tokens each expert gets.

    tokens per layer and expert, over the global batch   ->   printed line, metrics.jsonl and charts, report page

A step has layers x experts counts, too many for each record. So only about `MOST_COUNTS` records in a run hold counts. A
record with counts sums them over all steps since the previous record with counts.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from triaxis.engine.step import Engine
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.meters.step_meter import StepMeter
from triaxis.engine.telemetry.record.expert_load import entropy, max_over_mean
from triaxis.engine.telemetry.record.metrics import Measured

MOST_COUNTS = 100
"""Approximate number of records in a run that hold counts."""

_DIGITS = 4
"""Decimal places for ratios in files."""


@dataclass
class LoadMeter(StepMeter):
    """Meter for the record's `experts` field, on rank 0 alone.

    Attributes:
        layers: indices of the layers with experts.
        num_steps: number of steps in the whole run.
        log_interval: steps between printed lines.
    """

    layers: tuple[int, ...]
    num_steps: int
    log_interval: int
    _first_step: int | None = field(default=None, init=False)
    _counts: list[list[int]] = field(default_factory=list, init=False)

    @classmethod
    def of(cls, engine: Engine) -> "LoadMeter | None":
        """Build the meter. None if the model has no experts, and on ranks other than 0."""
        layers, log_interval = engine.config.model.expert_layers, engine.config.telemetry.log_interval
        return cls(layers, engine.plan.num_steps, log_interval) if layers and engine.topology.rank == 0 else None

    def begin(self, steps_made: int) -> None:
        """Begin a new sum of tokens per expert; unrecorded counts are dropped. `steps_made` is unused."""
        self._first_step, self._counts = None, []

    def has_counts(self, step: int) -> bool:
        """Whether the record of step `step`, counted from 1, holds counts. The last step's record always does."""
        every = self.log_interval * max(1, math.ceil(self.num_steps / (MOST_COUNTS * self.log_interval)))
        return step % every == 0 or step == self.num_steps

    def read(self, step: int, result: StepResult) -> Measured:
        """Read the load in step `step`, counted from 0. The printed line names the layer with the most uneven load."""
        if self._first_step is None:
            self._first_step, self._counts = step + 1, [[0] * len(counts) for counts in result.load]
        for total, counts in zip(self._counts, result.load, strict=True):
            total[:] = map(sum, zip(total, counts, strict=True))
        ratios, entropies = list(map(max_over_mean, result.load)), list(map(entropy, result.load))
        record: dict[str, Any] = {
            "layers": list(self.layers),
            "load_max_over_mean": [round(ratio, _DIGITS) for ratio in ratios],
            "entropy": [round(each, _DIGITS) for each in entropies],
            "dropped": result.dropped,
        }
        if self.has_counts(step + 1):
            record |= {"first_step": self._first_step, "last_step": step + 1, "counts": self._counts}
            self.begin(step + 1)
        place = max(range(len(ratios)), key=ratios.__getitem__)
        charts = {"health/experts/load_max_over_mean": ratios[place]}
        if result.dropped:
            charts["health/experts/dropped"] = result.dropped
        for layer, ratio, each in zip(self.layers, ratios, entropies, strict=True):
            charts |= {
                f"health/experts/layer_{layer}/load_max_over_mean": ratio,
                f"health/experts/layer_{layer}/entropy": each,
            }
        line = f"experts load max/mean {ratios[place]:.2f} (layer {self.layers[place]}), dropped {result.dropped:,}"
        return Measured({"experts": record}, charts, line)
