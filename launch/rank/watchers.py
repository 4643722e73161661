"""Create the watchers of a rank's steps, instructions and waits.

Watchers    created before the engine, which gets their `observers`
notices     a further watcher, created after telemetry; it reports a lost directory
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from triaxis.engine.pipeline.executor import InstructionObserver
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.run.step_parts import StepWatcher
from triaxis.engine.telemetry.outlets.hub import Telemetry
from triaxis.engine.telemetry.timing.clocks import clock_of
from triaxis.engine.telemetry.timing.marks import TimeMarks
from triaxis.engine.telemetry.trace.nvtx import NvtxRanges
from triaxis.engine.telemetry.trace.profile import StepProfiler
from triaxis.launch.rank.directory_watch import DirectoryWatch
from triaxis.launch.rank.hang_watch import open_heartbeat
from triaxis.launch.rank.join import Rank
from triaxis.launch.rank.step_times import open_step_times


class Watchers:
    """One rank's watchers.

    Args:
        rank: connected rank to watch.
        directory: run directory in which this attempt writes.

    Attributes:
        topology: this rank's topology, which tells watchers when the rank waits for communication.
        heartbeat: this rank's heartbeat; of all observers, it is told of each instruction first.
        times: step times; None if the configuration has no use for them.
        observers: observers of the engine's instructions.
        steps: all step watchers.
    """

    def __init__(self, rank: Rank, directory: RunDirectory) -> None:
        wanted, device = rank.config.telemetry, rank.topology.device
        self._directory = directory
        self._profiler: StepProfiler | None = None
        self.observers: list[InstructionObserver] = []
        self.steps: list[StepWatcher] = []
        self.heartbeat = open_heartbeat(rank.number, directory)
        self._add(self.heartbeat)
        marks = TimeMarks(clock_of(device)) if wanted.time_split or wanted.timeline is not None else None
        self.topology = rank.topology.observed([self.heartbeat] if marks is None else [self.heartbeat, marks])
        self.times = None if marks is None else open_step_times(rank.config, self.topology, marks, directory)
        if marks is not None and self.times is not None:
            self.observers.append(marks.instruction)
            self.steps.append(self.times)
        if wanted.nvtx:
            self._add(NvtxRanges())
        if wanted.profile is not None and rank.number in wanted.profile.ranks:
            self._profiler = StepProfiler(wanted.profile, directory.profile(rank.number, wanted.profile), device)
            self._add(self._profiler)

    def _add(self, watcher: StepWatcher) -> None:
        self.steps.append(watcher)
        self.observers.append(watcher.instruction)

    def notices(self, telemetry: Telemetry) -> Sequence[StepWatcher]:
        """On the logging rank, report a written trace, and create the watcher that reports a lost directory; [] elsewhere."""
        if telemetry.report is None:
            return []
        if self._profiler is not None:
            self._profiler.on_written = partial(_say_written, telemetry, self._directory.path)
        return [DirectoryWatch(self._directory, telemetry)]

    def close(self) -> None:
        """Close all watchers. A second call does nothing."""
        while self.steps:
            self.steps.pop(0).close()


def _say_written(telemetry: Telemetry, run: Path, trace: Path) -> None:
    telemetry.event("profiled", path=str(trace.relative_to(run)))
    telemetry.say(f"trace of rank 0: {trace}")
