"""Measures the shares of values that FP8 rounds to zero or clamps, every K steps.

    forward     counts the input X as the GEMM reads it, once per microbatch, and the weight W once
    backward    counts the output's gradient dY as the input gradient's GEMM reads it
    step's end  one integer all-reduce [linear layers in the model, 3 operands, 3 counts] over the world
    read        the sums reach the host together with the step's other numbers

K is `telemetry.fp8_interval`. `engine/linear/fp8_shares.py` does the counting.
"""

from itertools import islice, product

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.device.host_copy import HostCopy
from triaxis.engine.kernels.fp8.shares import ROLES
from triaxis.engine.linear.fp8_shares import Fp8Counts
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE
from triaxis.engine.step import Engine
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.meters.step_meter import StepMeter
from triaxis.engine.telemetry.record.metrics import Measured

PURPOSE = "fp8 shares"


class Fp8Shares(StepMeter):
    """Meter for the record's `fp8` field, by linear layer and operand.

    `underflow` is the share of nonzero values rounded to zero. `overflow` is the share of nonzero values clamped to the
    format's largest number. An operand that is all zeros has no entry. Charts are under health/fp8/. One chart per operand shows
    the worst layer.

    Args:
        counts: this rank's counts.
        world: axis over all ranks.
        interval: K, the distance in steps between two measured steps.
    """

    def __init__(self, counts: Fp8Counts, world: Axis, interval: int) -> None:
        self._counts, self._world, self._interval = counts, world, interval
        self._step = 0
        self._posted: dict[int, HostCopy] = {}

    @classmethod
    def of(cls, engine: Engine) -> "Fp8Shares | None":
        """Build the meter. None if `telemetry.fp8_interval` is not set."""
        counts, interval = engine.chunks[0].fp8_counts, engine.config.telemetry.fp8_interval
        if counts is None or interval is None:
            return None
        return cls(counts, engine.topology.axis("world"), interval)

    def begin(self, steps_made: int) -> None:
        """Start measuring with `steps_made` steps complete. Sums not read yet are dropped."""
        self._step = steps_made
        self._counts.end()
        self._posted.clear()

    def before_step(self) -> None:
        """Start counting if the next step is measured."""
        if (self._step + 1) % self._interval == 0:
            self._counts.begin()

    def after_update(self) -> None:
        """After a measured step, post the sums over all ranks."""
        if self._counts.is_open:
            total = self._world.all_reduce(self._counts.end(), PURPOSE).wait()
            self._posted[self._step] = HostCopy(total.flatten().to(AGREEMENT_DTYPE))
        self._step += 1

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Read the shares of values zeroed or clamped in step `step`, from 0. None if the step was not measured."""
        if step not in self._posted:
            return None
        numbers = iter(self._posted.pop(step).wait())
        fields: dict[str, dict[str, dict[str, float]]] = {linear: {} for linear in self._counts.linears}
        charts: dict[str, float] = {}
        for linear, operand in product(fields, ROLES):
            count, became_zero, clamped = islice(numbers, 3)
            if not count:
                continue
            fields[linear][operand] = {"underflow": became_zero / count, "overflow": clamped / count}
            for name, share in fields[linear][operand].items():
                charts[f"health/fp8/{linear}/{operand}_{name}"] = share
                charts[f"health/fp8/{operand}_{name}"] = max(share, charts.get(f"health/fp8/{operand}_{name}", 0.0))
        return Measured({"fp8": fields}, charts)
