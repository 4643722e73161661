"""Times the training loop's parts, builds each step's record and hands it to `Telemetry`.

    engine.train.train --enter, end_step, on_step, on_validation--> TrainingObserver --StepMetrics--> Telemetry

A step's time ends when the host is done with the step. The step's loss and norms may reach the host one step later. The loop
counts steps from 0. Records count completed steps, so from 1.
"""

import resource
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from triaxis.engine.comm.gather import Gathering
from triaxis.engine.comm.topology import Topology
from triaxis.engine.context_parallel.imbalance import imbalance
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.device.host_copy import to_device
from triaxis.engine.errors import counted
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE
from triaxis.engine.run.step_parts import StepPart, StepWatcher
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.meters.step_meter import StepMeter
from triaxis.engine.telemetry.outlets.hub import Telemetry
from triaxis.engine.telemetry.outlets.memory_check import MemoryCheck, comparison_line
from triaxis.engine.telemetry.record.metrics import Meter
from triaxis.engine.telemetry.timing.slow_ranks import SlowRanks
from triaxis.engine.telemetry.timing.step_times import StepTimes
from triaxis.engine.telemetry.timing.timers import Timers


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step's times, peak memory and `cp_imbalance`, kept until its loss and norms reach the host."""

    spans_seconds: dict[StepPart, float]
    unix_time_seconds: float
    peak_memory_bytes: int
    cp_imbalance: float | None


@dataclass(eq=False)
class TrainingObserver:
    """Implements `triaxis.engine.train.Observer` on one rank.

    Attributes:
        meter: calculator of this model's speeds from step times.
        timers: host clock for the loop's parts.
        watchers: objects notified of the loop's parts, `times` included.
        meters: measurements of each step (`triaxis.engine.telemetry.meters`).
        times: measurement of where step time goes, on all ranks; None if the configuration does not need it.
        slow_ranks: comparison of the ranks' compute time; None off the logging rank, or if times are not split.
        memory: one-time comparison of the ranks' memory with a prediction; None if there is nothing to compare.
        fusions: runners of compiled functions; what they compiled is reported once, after the first step.
        loss: loss in the last step with an unmasked label; None before the first such step.
        val_loss: last validation loss; None before the first validation.
    """

    telemetry: Telemetry
    meter: Meter
    device: torch.device
    timers: Timers = field(default_factory=Timers)
    watchers: Sequence[StepWatcher] = ()
    meters: Sequence[StepMeter] = ()
    times: StepTimes | None = None
    slow_ranks: SlowRanks | None = None
    memory: MemoryCheck | None = None
    fusions: Sequence[Fusion] = ()
    loss: float | None = field(default=None, init=False)
    val_loss: float | None = field(default=None, init=False)
    _cp_imbalance: float | None = field(default=None, init=False)
    _ended: deque[_Ended] = field(default_factory=deque, init=False)

    def begin(self, steps_made: int) -> None:
        """Start observing with `steps_made` steps complete. Host time measured so far is discarded.

        When called after a rollback, discard steps that ended without a record.
        """
        self.timers.end_step()
        self._ended.clear()
        for meter in self.meters:
            meter.begin(steps_made)
        for watcher in self.watchers:
            watcher.begin(steps_made)

    def enter(self, part: StepPart) -> None:
        """Notify timers, meters and watchers. Unless `part` is VALIDATION, the sinks first get the last step's record."""
        if part is not StepPart.VALIDATION:
            self.telemetry.flush()
        if self.telemetry.report is not None:
            self.telemetry.report.phase(StepPart.VALIDATION if part is StepPart.VALIDATION else "training")
        for meter in self.meters:
            if part is StepPart.FORWARD_BACKWARD:
                meter.before_step()
            elif part is StepPart.OPTIMIZER:
                meter.before_update()
        self.timers.enter(part)
        for watcher in self.watchers:
            watcher.enter(part)

    def on_batch(self, microbatches: Sequence[MicroBatch]) -> None:
        """Compute the next step's `cp_imbalance`: the largest attention work on a cp rank over the mean."""
        work = [each.rank_work for each in microbatches if each.rank_work is not None]
        self._cp_imbalance = imbalance(work) if work else None

    def end_step(self) -> None:
        """Stop the step's clock, read the peak memory, and call the meters' `after_update`.

        `on_step` must be called for the same step later, in the steps' order.
        """
        for meter in self.meters:
            meter.after_update()
        memory = peak_memory_bytes(self.device)
        self._ended.append(_Ended(self.timers.end_step(), time.time(), memory, self._cp_imbalance))
        if self.times is not None:
            self.times.end_step()

    def on_step(self, step: int, result: StepResult, lr: float) -> None:
        """Record step `step`, counted from 0, and report memory use and slow ranks when due.

        Memory use is compared once with the prediction. Every rank calls this method; the logging rank alone writes. `result` holds
        the step's numbers.
        """
        self.loss = result.loss if result.num_tokens else self.loss
        ended = self._ended.popleft()
        split = None if self.times is None else self.times.on_step(step + 1)
        compared = None if self.memory is None else self.memory.on_step()
        measured = [each for meter in self.meters if (each := meter.read(step, result)) is not None]
        if self.telemetry.report is None:
            return
        metrics = self.meter.measure(
            step + 1,
            loss=result.loss,
            loss_tokens=result.num_tokens,
            lr=lr,
            grad_norm=result.grad_norm,
            spans_seconds=ended.spans_seconds,
            unix_time_seconds=ended.unix_time_seconds,
            peak_memory_bytes=ended.peak_memory_bytes,
            cp_imbalance=ended.cp_imbalance,
        )
        self.telemetry.step(replace(metrics, time_split=split, measured=measured))
        self._report_compilation(step + 1)
        if compared is not None:
            self.telemetry.notice("memory", comparison_line(compared), style="", step=step + 1, **compared)
        if split is not None and self.slow_ranks is not None:
            for slow in self.slow_ranks.report(split.usual_compute):
                self.telemetry.notice(
                    "slow_rank",
                    str(slow),
                    step=step + 1,
                    rank=slow.rank,
                    host=slow.host,
                    compute_seconds=slow.seconds,
                    usual_seconds=slow.usual_seconds,
                )

    def _report_compilation(self, step: int) -> None:
        """Report once what was compiled by the end of the first step."""
        seconds, self.fusions = [each for fusion in self.fusions for each in fusion.compile_seconds], ()
        if seconds:
            functions, total = counted(len(seconds), "function"), sum(seconds)
            message = f"compiled {functions} in {total:.1f} s, during the first step"
            self.telemetry.notice("compiled", message, style="", step=step, functions=len(seconds), seconds=total)

    def on_allocator_retry(self, step: int, num_ranks: int) -> None:
        """Report that GPU memory ran short on `num_ranks` ranks in step `step`, counted from 0."""
        ranks = counted(num_ranks, "rank")
        message = (
            f"the allocator of {ranks} ran short of memory and had to free some. The next steps post each receive right before its "
            "use, so that no device waits meanwhile. They are slower; a layout or recompute choice that holds less avoids this"
        )
        self.telemetry.notice("allocator_retry", message, step=step + 1, num_ranks=num_ranks)

    def on_validation(self, step: int, loss: float) -> None:
        """Record the validation loss after step `step`, counted from 0."""
        self.val_loss = loss
        self.telemetry.validation(step + 1, loss, self.timers.running_seconds())

    def on_validation_left_out(self, step: int) -> None:
        """Report that the validation after step `step`, counted from 0, was stopped without a loss."""
        self.telemetry.say(
            f"no validation loss after step {step + 1:,}: the run stops first. The checkpoint of this step records that the "
            "validation is due",
            "yellow",
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Read this process's peak memory in bytes. On a GPU torch's allocations count, on the CPU resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_memory_of_ranks(topology: Topology) -> list[int]:
    """Gather every rank's `peak_memory_bytes` on rank 0, in rank order. The result is [] elsewhere. Every rank must call this."""
    mine = to_device([float(peak_memory_bytes(topology.device))], AGREEMENT_DTYPE, topology.device)
    rows = Gathering(topology, mine, "peak memory").finish()
    return [] if rows is None else [int(held) for held in rows.flatten().tolist()]
