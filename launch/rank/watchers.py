"""Watchers of a rank's steps and instructions: heartbeat, times, NVTX ranges, the run directory, torch's profiler."""

from pathlib import Path

from engine.config.telemetry import ProfileConfig
from engine.pipeline.lowering import Instruction
from engine.resilience.hang.heartbeat import Heartbeat
from engine.run.directory import RunDirectory
from engine.step import Engine
from engine.telemetry.outlets.hub import Telemetry
from engine.telemetry.timing.step_times import StepTimes
from engine.telemetry.trace.nvtx import NvtxRanges
from engine.telemetry.trace.profile import StepProfiler, StepWatcher
from launch.rank.directory_watch import DirectoryWatch


def open_watchers(
    engine: Engine,
    directory: RunDirectory,
    telemetry: Telemetry,
    steps_made: int,
    times: StepTimes | None,
    heartbeat: Heartbeat,
) -> list[StepWatcher]:
    """Who follows this rank through its steps, listening to its executor too.

    Args:
        engine: whose executor they listen to from now on.
        directory: where a trace is written.
        telemetry: where it is told.
        steps_made: before this attempt.
        times: of this rank's steps, where somebody asks for them.
        heartbeat: of this rank; the first to hear of each instruction.
    """
    watchers: list[StepWatcher] = [heartbeat] if times is None else [heartbeat, times]
    if engine.config.telemetry.nvtx:
        watchers.append(NvtxRanges(steps_made))
    if telemetry.report is not None:
        watchers.append(DirectoryWatch(directory, telemetry))
    wanted = engine.config.telemetry.profile
    if wanted is not None and engine.topology.rank in wanted.ranks:
        watchers.append(_profiler(engine, directory, telemetry, steps_made, wanted))

    def tell_all(instruction: Instruction | None) -> None:
        for watcher in watchers:
            watcher.instruction(instruction)

    engine.executor.observer = tell_all
    return watchers


def _profiler(
    engine: Engine, directory: RunDirectory, telemetry: Telemetry, steps_made: int, wanted: ProfileConfig
) -> StepProfiler:
    rank = engine.topology.rank

    def written(path: Path) -> None:
        telemetry.event("profiled", path=str(path.relative_to(directory.path)))
        if telemetry.report is not None:
            telemetry.report.say(f"trace of rank {rank}: {path}")

    return StepProfiler(wanted, directory.profile(rank, wanted), engine.topology.device, steps_made, written)
