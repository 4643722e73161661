"""Splits the step time before each printed line into the parts in `time_split.py`, from all ranks' times.

    printed line of step    1       10              20
    its split, on a CPU     none    steps 2 to 9    steps 10 to 19
    its split, on a GPU     none    step 9          step 19

An attempt's first step warms up, so it is in no split. On a GPU only the step before a line is measured, because marks cost time
there. A timeline's steps are measured on every device, and are also in the next split.

After the step before a line, each rank's times are gathered on rank 0, along tp, then pp, then dp (`triaxis.engine.comm.gather`). A
rank sends sixteen numbers. With a pipeline it also sends six for each measured step, and two for each action in that step.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.gather import Gathering
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.schema.telemetry import TelemetryConfig
from triaxis.engine.device.host_copy import HostCopy, to_device
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE
from triaxis.engine.pipeline.actions import Schedule
from triaxis.engine.run.step_parts import StepPart, StepWatcher
from triaxis.engine.telemetry.timing.bubble import Attribution, num_actions
from triaxis.engine.telemetry.timing.clock_offsets import measure_offset
from triaxis.engine.telemetry.timing.marks import MarkedStep, TimeMarks
from triaxis.engine.telemetry.timing.time_split import StepTally, TimeSplit
from triaxis.engine.telemetry.timing.timeline import Timeline
from triaxis.engine.telemetry.timing.timers import has_line

PURPOSE = "telemetry"
"""Ledger label for the gathered times."""


class StepTimes(StepWatcher):
    """Measures this rank's step times and, on rank 0, splits all ranks' times. All ranks make the same calls.

    Args:
        config: telemetry settings, of which the interval between lines and `time_split` are read.
        topology: this rank's topology, whose waits must be reported to `marks`.
        marks: this rank's time marks, to which instructions must be reported too.
        num_steps: number of steps in the whole run.
        timeline: this rank's timeline row, with the same steps on all ranks; None if the run has no timeline.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        topology: Topology,
        schedule: Schedule,
        marks: TimeMarks,
        *,
        num_steps: int,
        timeline: Timeline | None = None,
    ) -> None:
        self._config = config
        self._topology = topology
        self._world: Axis = topology.axis("world")
        self._num_actions = num_actions(schedule)
        self._num_steps = num_steps
        self._first_step: int | None = None
        self._marks = marks
        self._clock = marks.clock
        self._timeline = timeline
        self._traced = range(0) if timeline is None else timeline.steps
        self._anchor: tuple[Any, float] | None = None
        self._step = 0
        self._tally = StepTally()
        self._posted: tuple[Callable[[], torch.Tensor | None], StepTally] | None = None
        self._attribution: Attribution | None = None
        if topology.rank == 0:
            places = [topology.grid.coordinates(rank) for rank in range(topology.grid.world_size)]
            self._attribution = Attribution(schedule, places)

    def begin(self, steps_made: int) -> None:
        """Start measuring with `steps_made` steps complete. A measurement under way is dropped."""
        self._collect()
        self._tally = StepTally()
        self._step = steps_made
        if self._first_step is None:
            self._first_step = steps_made + 1
        self._compare_clocks()
        self._marks.begin(steps_made, is_marked=self._is_marked(steps_made + 1))

    def enter(self, part: StepPart) -> None:
        self._marks.enter(part)

    def end_step(self) -> None:
        """End a step on the host. The device may still be at work."""
        self._step += 1
        self._marks.enter(StepPart.OTHER)
        self._compare_clocks()
        self._marks.end_step(next_is_marked=self._is_marked(self._step + 1))

    def on_step(self, step: int) -> TimeSplit | None:
        """Add step `step`'s times, once the host has read the step's numbers. Steps count from 1.

        If step `step + 1` has a printed line, this rank's times are also sent to rank 0.

        Returns:
            On the logging rank, the split to print with this step's line. None on other ranks, if the step has no line,
            or if no earlier step was measured.
        """
        split = self._collect()
        marked = self._marks.take(step)
        if marked is not None:
            self._measure(marked)
        if self._tally.steps and has_line(step + 1, self._config.log_interval, self._num_steps):
            self._post()
        return split

    def finish(self) -> None:
        """End the measurement after the loop. On return, every rank has written its timeline row."""
        self._collect()
        self.close()
        if self._timeline is not None:
            self._world.barrier(self._topology.device, PURPOSE)

    def close(self) -> None:
        """Stop marking, and write the timeline steps measured so far."""
        self._marks.close()
        self._write_row()

    def _is_marked(self, step: int) -> bool:
        if step in self._traced and self._anchor is not None:
            return True
        if not self._config.time_split or step == self._first_step:
            return False
        return not self._clock.samples or has_line(step + 1, self._config.log_interval, self._num_steps)

    def _compare_clocks(self) -> None:
        """Compare the ranks' clocks once, before this attempt's first step in the timeline (a trace)."""
        assert self._first_step is not None, "a run begins with `begin`"
        first = max(self._traced.start, self._first_step)
        is_due = self._step + 1 == first and first in self._traced and self._anchor is None
        if self._timeline is not None and is_due:
            offset = measure_offset(self._world, self._topology.device)
            self._timeline.set_clock(offset.origin_seconds, offset.error_seconds)
            self._anchor = self._clock.anchor()

    def _measure(self, marked: MarkedStep) -> None:
        times = self._clock.elapsed(marked.marks)
        if self._config.time_split and marked.step != self._first_step:
            self._tally.add(marked.step, marked.activities, times, marked.calls_elapsed(self._clock))
        if self._timeline is not None and self._anchor is not None and marked.step in self._traced:
            mark, seconds = self._anchor
            start = seconds + self._clock.elapsed([mark, marked.marks[0]])[1]
            self._timeline.add(marked.step, marked.activities, [start + each for each in times])
            if marked.step == self._traced[-1]:
                self._write_row()
                self._traced = range(0)

    def _write_row(self) -> None:
        """Write the timeline row. If writing fails, print the error and go on."""
        try:
            if self._timeline is not None:
                self._timeline.write()
        except OSError as error:
            print(f"rank {self._topology.rank}: its row of the timeline is not written: {error}", file=sys.stderr)

    def _post(self) -> None:
        """Send this rank's times (`StepTally.numbers`) to rank 0, for the steps since the last call."""
        numbers = self._tally.numbers(self._num_actions)
        device = self._topology.device
        gathering = Gathering(self._topology, to_device(numbers, AGREEMENT_DTYPE, device), PURPOSE)
        if device.type == "cpu" or self._topology.staged:
            # Waiting here would stop the host.
            self._posted = gathering.finish, self._tally
        else:
            # The copy must come before the next step on the stream.
            rows = gathering.finish()
            self._posted = (lambda: None) if rows is None else HostCopy(rows).arrived, self._tally
        self._tally = StepTally()

    def _collect(self) -> TimeSplit | None:
        """Finish the last gather. Return the gather's split on the logging rank, None elsewhere."""
        if self._posted is None:
            return None
        (read, tally), self._posted = self._posted, None
        rows = read()
        if rows is None or self._attribution is None:
            return None
        return self._attribution.work_out(rows.cpu().numpy(), tally.steps[0], tally.steps[-1])
