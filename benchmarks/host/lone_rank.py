"""Rank 0 of a layout on the stub, without its peers and without values: kernels, copies and messages do nothing.

The host reads zeros. In place of the experts' counts that it has read, it gets equal ones.
"""

import os
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.cuda_stub.values import Values, library, with_values
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes, rank_grid
from triaxis.engine.config.tree import Config
from triaxis.engine.device.allocator import set_up_allocator
from triaxis.engine.expert_parallel.exchange_dispatch import ExchangeDispatch
from triaxis.engine.kernels import fusion
from triaxis.engine.kernels.registry import open_kernels
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.launch.footprint.real import draw_weights
from triaxis.launch.footprint.routing import counts_in_turn, known_rows
from triaxis.launch.footprint.run import assumed_rows
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

_PLAN = ExchangeDispatch._plan


def lone_engine(config: Config) -> Engine:
    """Build rank 0 as its card would. Only while kernels are tried are there values; the peak of memory counts from then on."""
    sizes, model, device = parallel_sizes(config), config.model, torch.device("cuda", 0)
    config, grid = resolve_recompute(config, sizes), rank_grid(config, sizes)
    library().card_values(0)
    torch.cuda.set_device(device)
    set_up_allocator(config.runtime, os.environ, device)
    with (
        patch("torch.distributed.distributed_c10d._store_based_barrier"),
        patch("triaxis.engine.comm.topology.compare_group_counts"),
    ):
        if grid.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl", rank=0, world_size=grid.world_size, store=dist.HashStore())
        topology = Topology(grid, 0, device, kv_heads=model.kv_heads, has_experts=model.has_experts)
    library().card_values(1)
    with patch.object(fusion, "CompiledFunction", with_values(fusion.CompiledFunction)), Values():
        kernels = open_kernels(config, topology, is_alone=True)
    library().card_values(0)
    if model.has_experts:
        known = known_rows(counts_in_turn(config, grid, 0, assumed_rows(config)), grid, 0)
        ExchangeDispatch._plan = lambda self, chosen, read, counts: _PLAN(self, chosen, known, counts)  # type: ignore[method-assign]
    torch.cuda.reset_peak_memory_stats(device)
    return build(config, topology, build_chunks, draw_weights, kernels)
