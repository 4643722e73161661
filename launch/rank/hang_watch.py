"""Create a rank's heartbeat and the thread that watches it (`engine/resilience/hang/watch.py`)."""

import sys

from triaxis.engine.comm.runtime import write_flight_record
from triaxis.engine.layout.axis_groups import axis_groups
from triaxis.engine.resilience.hang.heartbeat import Heartbeat, folders_of
from triaxis.engine.resilience.hang.report import RunLayout
from triaxis.engine.resilience.hang.watch import HangLimits, HangWatch
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.step import Engine
from triaxis.engine.telemetry.outlets.hub import Telemetry
from triaxis.engine.telemetry.record.events import EventLog
from triaxis.launch.start.process.failure import where


def open_heartbeat(rank: int, directory: RunDirectory) -> Heartbeat:
    heartbeat = Heartbeat(folders_of(directory.path), rank, directory.attempt)
    for reason in heartbeat.passed_over:
        print(f"rank {rank}: the heartbeat is in {heartbeat.path.parent} instead of {reason}", file=sys.stderr)
    return heartbeat


def open_hang_watch(engine: Engine, heartbeat: Heartbeat, directory: RunDirectory, telemetry: Telemetry) -> HangWatch:
    """Build the watch over this rank's heartbeat. The caller starts it."""
    topology, rank, model = engine.topology, engine.topology.rank, engine.config.model
    groups = axis_groups(topology.grid, model.kv_heads, has_experts=model.has_experts)
    layout = RunLayout(
        topology.grid,
        {name: members for name, members, _ in groups},
        engine.schedule,
        engine.forward_programs.schedule,
    )

    def announce(step: int, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        log = EventLog(directory.events(topology.grid.node(rank)), directory.attempt, rank=rank)
        log.write("hang", step=step, message=text.splitlines()[1].strip(), report=text)
        log.close()
        telemetry.close_early()

    runtime = engine.config.runtime
    limits = HangLimits.after(runtime.hangs_after_seconds, runtime.timeout_seconds)
    has_gpu = topology.device.type == "cuda"

    def place(number: int, pid: int) -> str:
        """Describe the GPU and process of a rank on this node. Consecutive ranks have consecutive GPUs."""
        apart = number - rank
        return where(topology.device.index + apart if has_gpu and topology.device.index is not None else None, pid)

    return HangWatch(
        heartbeat,
        layout,
        directory.hang(),
        limits,
        announce,
        write_flight_record,
        where=place,
        next_action=lambda: directory.next_start(engine.config),
    )
