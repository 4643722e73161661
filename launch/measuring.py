"""What measures the steps of a rank, put together: its clock, its row in the timeline, who compares the ranks.

open      topology, schedule, telemetry.*   ->  StepTimes on every rank, SlowRanks on rank 0
finish    the rows of all ranks             ->  timeline.json
"""

import socket

from engine.errors import TriaxisError
from engine.step import Engine
from engine.telemetry.clocks import clock_of
from engine.telemetry.hub import Telemetry
from engine.telemetry.memory_check import MemoryCheck
from engine.telemetry.run_dir import RunDirectory
from engine.telemetry.slow_ranks import SlowRanks
from engine.telemetry.step_times import StepTimes
from engine.telemetry.timeline import Row, Timeline, merge
from models.memory import predict


def open_step_times(engine: Engine, directory: RunDirectory, steps_made: int) -> StepTimes | None:
    """What times this rank's steps; None where nobody asks for it. Every rank calls it."""
    config, topology = engine.config.telemetry, engine.topology
    if not config.time_split and config.timeline is None:
        return None
    schedule, timeline = engine.schedule, None
    if config.timeline is not None:
        row = Row(
            topology.rank,
            topology.grid.world_size,
            f"{topology.coordinates}  {socket.gethostname()}",
            topology.coordinates.pp,
            schedule.placement,
        )
        steps = range(config.timeline.start, config.timeline.start + config.timeline.steps)
        timeline = Timeline(steps, row, directory.timeline_row(topology.rank))
    return StepTimes(
        config,
        topology,
        schedule,
        num_steps=engine.plan.num_steps,
        steps_made=steps_made,
        clock=clock_of(topology.device),
        timeline=timeline,
    )


def open_slow_ranks(engine: Engine, times: StepTimes | None) -> SlowRanks | None:
    """What compares the ranks by name and host; None where their times are not split. Every rank calls it."""
    topology = engine.topology
    if times is None or not engine.config.telemetry.time_split:
        return None
    hosts = topology.axis("world").tell(socket.gethostname(), topology.device, "hosts")
    return SlowRanks(times.stage_ranks, hosts)


def open_memory_check(engine: Engine) -> MemoryCheck | None:
    """Compare measured with predicted memory; None on the CPU, where tensors are not counted. Every rank calls it."""
    topology = engine.topology
    if topology.device.type != "cuda":
        return None
    ranks = predict(engine.config, topology.sizes, nccl=not topology.staged).ranks
    return MemoryCheck(topology, [(rank.tensors, rank.communicators) for rank in ranks])


def finish_step_times(times: StepTimes | None, directory: RunDirectory, telemetry: Telemetry) -> None:
    """The loop has ended on all ranks: rank 0 puts the rows of the timeline together, if any were written in this attempt."""
    if times is None:
        return
    times.finish()
    if telemetry.report is None or not directory.timeline_row(0).exists():
        return
    try:
        merged = merge(directory.path)
    except (OSError, TriaxisError) as error:
        telemetry.report.say(
            f"{error}\nThe run is not harmed; `triaxis timeline {directory.path}` tries again.", "yellow"
        )
        return
    telemetry.report.say(str(merged))
    telemetry.event("profiled", path=str(merged.path.relative_to(directory.path)))
