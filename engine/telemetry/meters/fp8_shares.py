"""Numbers that FP8 loses, counted per linear layer and operand on every K-th step (`telemetry.fp8_interval`).

    forward     of X as the GEMM reads it, once per microbatch (not where a layer is replayed), and of W once
    backward    of dY as the gradient of the input reads it
    step's end  one all-reduce of integers [linear layers of the model, 3 operands, 3] over the world
    read        with the numbers of the step, on the host

`engine/linear/fp8_shares.py` counts.
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
    """`fp8` of the record: by linear layer and operand, shares of the numbers that are not zero, where there are any.

    `underflow` is rounded to zero, `overflow` clamped to the largest number of the format. Charts are under fp8/, with the worst
    layer's of each operand.

    Args:
        counts: of this rank.
        world: all ranks.
        interval: K, steps from one measured step to the next.
    """

    def __init__(self, counts: Fp8Counts, world: Axis, interval: int) -> None:
        self._counts, self._world, self._interval = counts, world, interval
        self._step = 0
        self._posted: dict[int, HostCopy] = {}

    @classmethod
    def of(cls, engine: Engine) -> "Fp8Shares | None":
        """Make that of a run; None where `telemetry.fp8_interval` does not ask for it."""
        counts, interval = engine.chunks[0].fp8_counts, engine.config.telemetry.fp8_interval
        if counts is None or interval is None:
            return None
        return cls(counts, engine.topology.axis("world"), interval)

    def begin(self, steps_made: int) -> None:
        """Begin after so many steps; measurements that were not read are dropped."""
        self._step = steps_made
        self._counts.end()
        self._posted.clear()

    def before_step(self) -> None:
        """Count in the step that is about to begin, where it is one of every K."""
        if (self._step + 1) % self._interval == 0:
            self._counts.begin()

    def after_update(self) -> None:
        """Post the sums over all ranks of a step that was counted."""
        if self._counts.is_open:
            total = self._world.all_reduce(self._counts.end(), PURPOSE).wait()
            self._posted[self._step] = HostCopy(total.flatten().to(AGREEMENT_DTYPE))
        self._step += 1

    def read(self, step: int, result: StepResult) -> Measured | None:
        """Return the shares of step number `step` (from 0); None where it was not measured."""
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
