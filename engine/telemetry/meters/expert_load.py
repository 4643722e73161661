"""The meter of the experts' load.

    tokens of the global batch that chose each expert, by layer   ->   line, files, page

The counts themselves are large (layers x E), so at most about `MOST_COUNTS` records of a run have them: those of the steps since
the record before that had them.
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
"""Records of a run that have the counts."""

_DIGITS = 4
"""Digits of ratios in files."""


@dataclass
class LoadMeter(StepMeter):
    """`experts` of the record, on rank 0, which alone writes.

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
    def of(cls, engine: Engine) -> "LoadMeter | None":
        """Make that of a run; None where the model has no experts, and off rank 0."""
        layers, log_interval = engine.config.model.expert_layers, engine.config.telemetry.log_interval
        return cls(layers, engine.plan.num_steps, log_interval) if layers and engine.topology.rank == 0 else None

    def begin(self, steps_made: int) -> None:
        """Forget the counts so far."""
        self._first_step, self._counts = None, []

    def has_counts(self, step: int) -> bool:
        """Return whether the record of a step, counted from 1, has the counts: some steps with a line, and the last."""
        every = self.log_interval * max(1, math.ceil(self.num_steps / (MOST_COUNTS * self.log_interval)))
        return step % every == 0 or step == self.num_steps

    def read(self, step: int, result: StepResult) -> Measured:
        """Return the load of step number `step`, from 0; the line names the layer with the most uneven one."""
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
