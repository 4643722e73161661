"""Create a rank's step timers, and merge all ranks' timelines at the end.

open      topology, schedule, telemetry.*   ->  StepTimes on every rank, SlowRanks on rank 0
finish    the rows of all ranks             ->  timeline.json
"""

import shlex
import socket

import torch

from triaxis.engine.comm.gather import Gathering
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import batch_plan
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import TriaxisError
from triaxis.engine.pipeline import schedules
from triaxis.engine.program import triaxis
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.step import Engine
from triaxis.engine.telemetry.outlets.hub import Telemetry
from triaxis.engine.telemetry.outlets.memory_check import MemoryCheck
from triaxis.engine.telemetry.timing.marks import TimeMarks
from triaxis.engine.telemetry.timing.slow_ranks import SlowRanks
from triaxis.engine.telemetry.timing.step_times import StepTimes
from triaxis.engine.telemetry.timing.timeline import RowIdentity, Timeline, merge
from triaxis.models.predict.rank_memory import predict

HOST_BYTES = 64
"""Linux truncates host names to this length (HOST_NAME_MAX)."""


def open_step_times(config: Config, topology: Topology, marks: TimeMarks, directory: RunDirectory) -> StepTimes:
    """Create this rank's step timer. The timer reads `marks`, which record when the rank waits for communication."""
    schedule, timeline = schedules.of_step(config, topology.sizes), None
    steps = config.telemetry.timeline
    if steps is not None:
        row = RowIdentity(
            topology.rank,
            topology.grid.world_size,
            f"{topology.coordinates}  {socket.gethostname()}",
            topology.coordinates.pp,
            schedule.placement,
        )
        timeline = Timeline(range(steps.start, steps.start + steps.steps), row, directory.timeline_row(topology.rank))
    num_steps = batch_plan(config, topology.sizes.dp).num_steps
    return StepTimes(config.telemetry, topology, schedule, marks, num_steps=num_steps, timeline=timeline)


def open_slow_ranks(engine: Engine, times: StepTimes | None) -> SlowRanks | None:
    """Create rank 0's reporter of slow ranks; None elsewhere, or without `telemetry.time_split`. Every rank calls it."""
    topology = engine.topology
    if times is None or not engine.config.telemetry.time_split:
        return None
    name = socket.gethostname().encode()[:HOST_BYTES].ljust(HOST_BYTES, b"\0")
    row = torch.frombuffer(bytearray(name), dtype=torch.uint8).to(topology.device)
    rows = Gathering(topology, row, "hosts").finish()
    if rows is None:
        return None
    hosts = [bytes(name).rstrip(b"\0").decode(errors="replace") for name in rows.cpu().numpy()]
    ranks = range(topology.grid.world_size)
    return SlowRanks([topology.grid.coordinates(rank).pp for rank in ranks], hosts)


def open_memory_check(engine: Engine) -> MemoryCheck | None:
    """Create the comparison of measured and predicted memory; None on the CPU. All ranks call it."""
    topology = engine.topology
    if topology.device.type != "cuda":
        return None
    ranks = predict(engine.config, topology.sizes, nccl=not topology.staged).ranks
    return MemoryCheck(topology, [(rank.tensors, rank.communicators) for rank in ranks])


def finish_step_times(times: StepTimes | None, directory: RunDirectory, telemetry: Telemetry) -> None:
    """Finish the timing, and merge the timeline rows of this attempt on rank 0, if any.

    Call it after the loop has ended on all ranks. A failed merge is only printed.
    """
    if times is None:
        return
    times.finish()
    if telemetry.report is None or not directory.timeline_row(0).exists():
        return
    try:
        merged = merge(directory.path)
    except (OSError, TriaxisError) as error:
        again = triaxis(f"report {shlex.quote(str(directory.path))} --timeline")
        telemetry.say(f"{error}\nThe run is not harmed. Try again:  {again}", "yellow")
        return
    telemetry.say(str(merged))
    telemetry.event("profiled", path=str(merged.path.relative_to(directory.path)))
