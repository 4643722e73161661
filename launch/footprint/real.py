"""Run training steps of one rank on the local device, in a fake world.

The other ranks do not exist. A receive leaves its buffer as it is, so loss and gradients are meaningless and may not be finite. The
kernels, their shapes and order, the allocator's memory and the rank's compute time are real. Messages take no time.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from triaxis.engine.comm.ledger import Event
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes, rank_grid
from triaxis.engine.config.tree import Config
from triaxis.engine.kernels.registry import open_kernels
from triaxis.engine.layout.rank_grid import Coordinates
from triaxis.engine.tensor_parallel.parameter import ShardedParameter
from triaxis.engine.train import ModelBuilder, build
from triaxis.launch.footprint.routing import counts_in_turn, know_rows, known_rows
from triaxis.launch.footprint.run import assumed_rows, fake_world, microbatches, require_rank
from triaxis.models.predict.rank_memory import resolve_recompute

WEIGHT_STD = 0.02

WARM_UP = 1
"""Steps that are not reported: kernels are loaded, compiled and chosen, and the allocator gets its segments."""


@dataclass(frozen=True, slots=True)
class RealSteps:
    """Measurements of one rank.

    Attributes:
        coordinates: the rank's coordinates.
        seconds: time of each step after the warm-up.
        peak_allocated_bytes: peak memory held by tensors, as the GPU's allocator rounds it; None on the CPU.
        peak_reserved_bytes: peak memory that the allocator reserved; None on the CPU.
        events: communication calls posted in the last step.
    """

    coordinates: Coordinates
    seconds: tuple[float, ...]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    events: tuple[Event, ...]


def real_steps(
    config: Config, rank: int, build_model: ModelBuilder, device: torch.device, *, num_steps: int = 1
) -> RealSteps:
    """Run the warm-up and `num_steps` more steps, and measure them.

    The peaks include building and warm-up.

    Args:
        config: the run's configuration; `parallel.dp` is set.
        rank: rank in the layout.
        build_model: model builder, as for training.
        device: the rank's device.
        num_steps: number of measured steps.

    Raises:
        TopologyError: there is no such rank, or this process already belongs to a process group.
    """
    sizes = parallel_sizes(config)
    config = resolve_recompute(config, sizes)
    require_rank(rank, sizes)
    grid = rank_grid(config, sizes)
    is_cuda = device.type == "cuda"
    with fake_world(rank, sizes.world_size):
        topology = Topology(grid, rank, device, kv_heads=config.model.kv_heads, has_experts=config.model.has_experts)
        if is_cuda:
            # Before CUDA is initialized, its allocator has no devices, and the reset would fail.
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(device)
        engine = build(config, topology, build_model, draw_weights, open_kernels(config, topology, is_alone=True))
        if config.model.has_experts:
            know_rows(engine, known_rows(counts_in_turn(config, grid, rank, assumed_rows(config)), grid, rank))
        batches = microbatches(engine)
        seconds = []
        for _ in range(WARM_UP + num_steps):
            _finish(device)
            begin = time.perf_counter()
            engine.update(engine.forward_backward(batches), lr=config.optimizer.lr)
            engine.buffers.wait_all()
            _finish(device)
            seconds.append(time.perf_counter() - begin)
        found = RealSteps(
            topology.coordinates,
            tuple(seconds[WARM_UP:]),
            torch.cuda.max_memory_allocated(device) if is_cuda else None,
            torch.cuda.max_memory_reserved(device) if is_cuda else None,
            tuple(topology.ledger.posted),
        )
        topology.close()
    return found


@torch.no_grad()
def draw_weights(parameters: Iterable[ShardedParameter], seed: int) -> None:
    """Draw normal weights with standard deviation WEIGHT_STD, in place. The seed is not used."""
    for parameter in parameters:
        parameter.value.normal_(std=WEIGHT_STD)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
