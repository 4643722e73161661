"""Run one rank's steps in a fake world on the CPU, and find races.

A rank runs these in turn:

    step          receives are posted early; a send ends when it is waited for
    save          the optimizer's state is copied as in a background checkpoint
    step          receives are posted late; a send ends when it is first queried
    validation    a forward-only step

The engine's own code runs on real tensors. A receive leaves its buffer's old content, since the order of operators does not depend
on values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from triaxis.engine.checkpoint.writer import RankWriter
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.comm.staging import Carrier
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes, rank_grid
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.device.copy_lane import SideStream
from triaxis.engine.kernels.registry import open_kernels
from triaxis.engine.layout.rank_grid import Coordinates, RankGrid
from triaxis.engine.optimizer.host_state import InHostMemory
from triaxis.engine.pipeline.lowering import Instruction
from triaxis.engine.pipeline.text import instruction_tokens
from triaxis.engine.step import Engine
from triaxis.engine.step_result import PendingResult
from triaxis.engine.train import ModelBuilder, build
from triaxis.launch.footprint.races.report import Race
from triaxis.launch.footprint.races.streams import (
    CommunicatorStream,
    HostReads,
    ReadingThread,
    WatchedCuda,
    WatchedFromCuda,
    WatchedStaging,
)
from triaxis.launch.footprint.races.watch import RaceWatch
from triaxis.launch.footprint.real import draw_weights
from triaxis.launch.footprint.routing import counts_in_turn, know_rows, known_rows
from triaxis.launch.footprint.run import AS_WRITTEN, CPU, assumed_rows, fake_world, microbatches, require_rank
from triaxis.models.predict.rank_memory import resolve_recompute


@dataclass(frozen=True, slots=True)
class CheckedRank:
    """The outcome for one rank.

    Attributes:
        coordinates: the rank's coordinates.
        streams: names of the streams that were used.
        num_operators: number of operators posted on all streams.
        races: races found; empty if every use is ordered.
    """

    coordinates: Coordinates
    streams: tuple[str, ...]
    num_operators: int
    races: tuple[Race, ...]


def check_rank(config: Config, rank: int, build_model: ModelBuilder) -> CheckedRank:
    """Run two training steps, a save and a validation on one rank, and find their races.

    Args:
        config: the run's configuration, small enough for this machine; `parallel.dp` is set.
        rank: rank in the layout.
        build_model: model builder, as for training.

    Raises:
        TopologyError: there is no such rank, or this process already belongs to a process group.
    """
    for key, choice in AS_WRITTEN.items():
        config = with_value(config, key, choice)
    sizes = parallel_sizes(config)
    config = resolve_recompute(config, sizes)
    require_rank(rank, sizes)
    grid = rank_grid(config, sizes)
    watch = RaceWatch()
    with fake_world(rank, sizes.world_size):
        topology = Topology(
            grid,
            rank,
            CPU,
            kv_heads=config.model.kv_heads,
            has_experts=config.model.has_experts,
            carrier=_staging(watch) if config.runtime.collectives == "gloo" else partial(CommunicatorStream, watch),
        )
        kernels, pp = open_kernels(config, topology, is_alone=True), topology.coordinates.pp

        def observe(instruction: Instruction | None) -> None:
            watch.during = "" if instruction is None else instruction_tokens(pp, [instruction])[0]

        engine = build(config, topology, build_model, draw_weights, kernels, [observe])
        if config.model.has_experts:
            know_rows(engine, known_rows(counts_in_turn(config, grid, rank, assumed_rows(config)), grid, rank))
        with watch:
            _name_memory(engine, watch)
            _put_on_streams(engine, watch)
            _run(engine, watch)
        topology.close()
    return CheckedRank(topology.coordinates, watch.streams, watch.num_operators, tuple(watch.races))


def _staging(watch: RaceWatch) -> Callable[[str, Ledger], Carrier]:
    return lambda name, ledger: WatchedStaging(watch, name)


def representative_ranks(grid: RankGrid) -> list[int]:
    """Choose ranks that represent all, in ascending order.

    They are on the first, middle and last pp stage, with the smallest or the largest tp, cp and dp indices.
    """
    sizes = grid.sizes
    ends = ({"tp": 0, "cp": 0, "dp": 0}, {"tp": sizes.tp - 1, "cp": sizes.cp - 1, "dp": sizes.dp - 1})
    return sorted({grid.rank(pp=pp, **end) for pp in (0, sizes.pp // 2, sizes.pp - 1) for end in ends})


def _name_memory(engine: Engine, watch: RaceWatch) -> None:
    """Name the flat buffers, their parameters and the optimizer's state."""
    for buffer in engine.buffers.buffers:
        entries = [entry for bucket in buffer.layout.buckets for entry in bucket.entries]
        parts = [(entry.start, entry.stop, entry.record.name) for entry in entries]
        for name, tensors in (("parameters", buffer.weights), ("main grads", buffer.grads)):
            for number, tensor in enumerate(tensors):
                if len(tensors) == 1:
                    watch.call(tensor, f"the flat {name}", parts)
                else:
                    watch.call(tensor, f"slot {number} of the {name}" if number else f"the owned {name}")
    for tensor in (*engine.optimizer.resident.tensors, *engine.optimizer.resident.host_tensors):
        watch.call(tensor, "the optimizer's state")


def _put_on_streams(engine: Engine, watch: RaceWatch) -> None:
    """Replace the streams on which the engine copies between device and host with watched streams."""
    engine.to_host = WatchedFromCuda(watch)
    resident = engine.optimizer.resident
    if isinstance(resident, InHostMemory):
        resident.to_device = SideStream(CPU, WatchedCuda(watch, "the optimizer's stream to the device"))
        resident.to_host = SideStream(CPU, WatchedCuda(watch, "the optimizer's stream to the host"))
        for tensor in resident.host_tensors:
            watch.is_host_memory(tensor)
    saving = {id(chunk.saved): chunk.saved for chunk in engine.chunks}
    for number, saved in enumerate(saving.values()):
        if saved.host is not None:
            saved.host.lane = SideStream(
                CPU, WatchedCuda(watch, "the offload stream" + (f" {number}" if number else ""))
            )
            saved.host.making = watch.host_memory


def _run(engine: Engine, watch: RaceWatch) -> None:
    """Run a step, a save, a step and a validation."""
    batches = microbatches(engine)

    def step() -> PendingResult:
        return engine.update(engine.forward_backward(batches), engine.config.optimizer.lr)

    copies = WatchedFromCuda(watch)
    with watch.host_memory():
        writer = RankWriter(
            engine.optimizer,
            engine.topology.rank,
            in_background=True,
            on_retry=lambda error: None,
            to_host=copies,
            thread=ReadingThread(watch, copies),
        )
    engine.train_programs.receive_early()
    first = step()
    writer.save(Path())
    watch.sends_end = True
    engine.train_programs.receive_late(1)
    second = step()
    with HostReads(watch):
        first.read()
        second.read()
        engine.evaluate([batches])
    engine.buffers.wait_all()
