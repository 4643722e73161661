"""One training step of one rank of any layout, in one process: fake tensors, a fake process group, the engine's own code.

Tensors have shapes and no memory, collectives return at once, so a rank of thousands fits on a laptop. What is counted is what the
same code would do: calls and bytes of the ledger, live storages by kind, operators dispatched.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine.collectives import Event
from engine.config import Config, parallel_sizes
from engine.data.loader import MicroBatch
from engine.errors import TopologyError
from engine.footprint.memory import MemoryKind, MemoryWatch, Peak, SavedTensor
from engine.precision import AGREEMENT_DTYPE
from engine.rank_grid import Coordinates, RankGrid
from engine.step import NO_FLAGS, Engine
from engine.topology import Topology
from engine.train import ModelBuilder, build

HEAD_MODULES = ("head", "losses")
"""Modules of the last chunk whose saved tensors are logits."""

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one rank does in a step.

    Attributes:
        coordinates: of the rank.
        stages: numbers of the pipeline stages that it holds.
        num_microbatches: of the step.
        state: bytes between steps: parameters, gradients, optimizer.
        peak: the moment with the most bytes.
        most: the most bytes of each kind, each at a moment of its own.
        saved: what the first forward of each chunk keeps for its backward, in order.
        events: the ledger.
        ops: operators dispatched, by name.
    """

    coordinates: Coordinates
    stages: tuple[int, ...]
    num_microbatches: int
    state: dict[MemoryKind, int]
    peak: Peak
    most: dict[MemoryKind, int]
    saved: tuple[SavedTensor, ...]
    events: tuple[Event, ...]
    ops: Counter[str]


def footprint(config: Config, rank: int, build_model: ModelBuilder) -> Footprint:
    """Run a step of `rank` in the layout of the config.

    Raises:
        TopologyError: there is no such rank, or this process already belongs to a process group.
    """
    sizes = parallel_sizes(config)
    if not 0 <= rank < sizes.world_size:
        raise TopologyError(
            f"rank {rank} does not exist: {sizes} has {sizes.world_size:,} ranks, counted from 0. Choose one below."
        )
    with fake_world(rank, sizes.world_size), FakeTensorMode(allow_non_fake_inputs=True):
        grid = RankGrid(
            sizes, config.runtime.ranks_per_node, allow_tp_across_nodes=config.parallel.allow_tp_across_nodes
        )
        topology = Topology(grid, rank, CPU, kv_heads=config.model.kv_heads)
        with MemoryWatch() as watch:
            engine = build(config, topology, build_model, fill=lambda parameters, seed: None)
            measured = watch_step(engine, microbatches(engine), watch)
        topology.close()
    return measured


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A default process group whose other ranks do not exist."""
    if dist.is_initialized():
        raise TopologyError(
            "this process belongs to a process group already; a footprint makes one of its own. Use a new process."
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def microbatches(engine: Engine) -> list[MicroBatch]:
    """As many as a step has; all are the same."""
    shape = (engine.plan.micro_batch_size, engine.config.model.seq_length)
    ids = torch.zeros(shape, dtype=torch.int64)
    one = MicroBatch(ids, ids, torch.ones(shape, dtype=torch.bool), ids, list(range(shape[0])))
    return [one] * engine.plan.num_microbatches


def watch_step(engine: Engine, batches: Sequence[MicroBatch], watch: MemoryWatch) -> Footprint:
    """A whole step under an entered watch, of real or fake tensors."""
    for buffer in engine.buffers.buffers:
        watch.label(buffer.parameters, "parameters")
        watch.label(buffer.main_grads, "gradients")
    for owned in engine.optimizer.owned:
        if owned.master.dtype != owned.parameters.dtype:  # else it is the parameter
            watch.label(owned.master, "optimizer")
        watch.label(owned.exp_avg, "optimizer")
        watch.label(owned.exp_avg_sq, "optimizer")
    between_steps: tuple[MemoryKind, ...] = ("parameters", "gradients", "optimizer")
    state = {kind: watch.live[kind] for kind in between_steps}
    watch.forget_peak()
    with watch.looking_at([cast(nn.Module, chunk) for chunk in engine.chunks], HEAD_MODULES):
        engine.run_microbatches(batches)
    engine.optimizer.grad_square_sum()
    # What `Engine.update` agrees on; here nobody answers, so nothing is read back.
    vector = torch.zeros(3 + len(NO_FLAGS), dtype=AGREEMENT_DTYPE)
    engine.topology.axis("world").all_reduce(vector, "step").wait()
    engine.optimizer.step(lr=1e-3, grad_scale=1.0)
    engine.buffers.wait_all()
    topology = engine.topology
    placement = engine.train_program.schedule.placement
    return Footprint(
        coordinates=topology.coordinates,
        stages=tuple(placement.stage_of(topology.coordinates.pp, chunk) for chunk in range(topology.sizes.vpp)),
        num_microbatches=engine.plan.num_microbatches,
        state=state,
        peak=watch.peak,
        most=dict(watch.most),
        saved=tuple(watch.saved),
        events=tuple(topology.ledger.posted),
        ops=Counter(watch.ops),
    )
