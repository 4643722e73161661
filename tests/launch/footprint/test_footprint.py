"""A footprint equals the real step of the same rank: the ledger line by line, state and activations byte by byte."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case
from triaxis.engine.comm.ledger import Event
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import TopologyError
from triaxis.engine.layout.partition import partition
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.train import build
from triaxis.launch.footprint.memory import MemoryWatch
from triaxis.launch.footprint.run import Footprint, Footprints, microbatches, watch_step
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.predict.traffic import expected_traffic, measured_traffic

CASES = (
    Case("gpt", tp=2, pp=2, vpp=2, dp=2, zero=2, sequence_parallel=True, dtype="bf16"),
    Case("qwen", tp=4, pp=1, dp=2, zero=3, dtype="bf16", recompute=("full", "uniform", 1)),
    Case("llama", tp=2, pp=4, layers_per_stage=(1, 3, 2, 2), dtype="fp32"),
    Case(
        "qwen",
        tp=2,
        pp=2,
        dtype="bf16",
        recompute=("selective", "uniform", 1),
        modules=("norm", "rope", "activation", "mlp"),
        offload=2,
    ),
    Case("kinds", tp=2, pp=2, sequence_parallel=True, num_layers=4, documents=True, micro_batch_size=2),
    Case("kinds", tp=2, cp=2, pp=2, sequence_parallel=True, num_layers=4, documents=True),
    Case("moe in turn", tp=2, cp=2, ep=2, etp=2, num_layers=2, dispatch="all_to_all", documents=True),
    Case(
        "moe in turn",
        dp=4,
        dp_replicas=2,
        ep=2,
        zero=2,
        num_layers=2,
        recompute=("full", "uniform", 1),
        dtype="bf16",
        offload_state=True,
    ),
)


def real(rank: int, config: Config) -> Footprint:
    grid = RankGrid(parallel_sizes(config))
    topology = Topology(
        grid, rank, torch.device("cpu"), kv_heads=config.model.kv_heads, has_experts=config.model.has_experts
    )
    with MemoryWatch() as watch:
        engine = build(resolve_recompute(config, topology.sizes), topology, build_chunks, on_saved=watch.on_saved)
        return watch_step(engine, microbatches(engine), watch)[0]


def faked(rank: int, config: Config, ranks: Sequence[int]) -> list[Footprint]:
    """In a process that has no group of its own (run with one rank)."""
    return [Footprints(config, build_chunks).of(one) for one in ranks]


def words(events: Sequence[Event]) -> list[tuple[Any, ...]]:
    return [(each.op, each.axis, each.purpose, each.dtype, each.numel, each.group_size, each.peer) for each in events]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=pytest.mark.slow if number else ()) for number, case in enumerate(CASES)],
)
def test_it_is_what_real_ranks_do(case: Case) -> None:
    config = case.config()
    measured = run_ranks(real, case.world_size, config)
    (predicted,) = run_ranks(faked, 1, config, range(case.world_size))
    for got, want in zip(predicted, measured, strict=True):
        assert got.coordinates == want.coordinates and got.stages == want.stages
        assert words(got.events) == words(want.events)
        assert got.state == want.state
        assert got.saved == want.saved
        # gloo's reduce-scatter has buffers of its own, and a send keeps its tensor until the network has taken it.
        for kind in ("parameters", "gradients", "optimizer", "activations", "logits"):
            assert got.most.get(kind, 0) == want.most.get(kind, 0), kind


@pytest.mark.distributed
def test_traffic_of_any_rank_is_that_of_the_formulas() -> None:
    config = Case("gpt", tp=4, pp=8, vpp=1, dp=16, global_batch_size=64, sequence_parallel=True).config()
    ranks = (0, 5, 200, 511)
    (found,) = run_ranks(faked, 1, config, ranks)
    sizes = parallel_sizes(config)
    for one, rank in zip(found, ranks, strict=True):
        stages = partition(config.model.num_layers, sizes.pp, sizes.vpp, None)
        at = RankGrid(sizes).coordinates(rank)
        assert measured_traffic(one.events) == expected_traffic(config, sizes, at, stages)


@pytest.mark.distributed
def test_a_rank_that_does_not_exist() -> None:
    with pytest.raises(TopologyError, match="8 ranks, counted from 0"):
        Footprints(CASES[0].config(), build_chunks).of(8)


def test_what_a_gpu_alone_has_is_counted_as_written() -> None:
    plain = Case("gpt", dtype="bf16", num_layers=2).config()
    asked = plain.kernels.model_copy(update={"graphs": "on", "weight_grad": "fused", "elementwise": "compiled"})
    for_a_gpu = plain.model_copy(update={"kernels": asked})
    one, other = (Footprints(config, build_chunks).of(0) for config in (plain, for_a_gpu))
    assert one == other
