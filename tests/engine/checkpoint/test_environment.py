"""The layout in a manifest: what runs, not what was asked, and which leaf of it differs when a run goes on."""

import torch

from tests.parity.cases import Case
from triaxis.engine.checkpoint.environment import describe_environment, layout_differences
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute


def built(recompute: RecomputeConfig, attention: str = "auto") -> Engine:
    config = with_value(Case("llama", num_layers=2, attention=attention).config(), "recompute", recompute)
    return build(
        resolve_recompute(config, ParallelSizes()),
        Topology(RankGrid(ParallelSizes()), 0, torch.device("cpu")),
        build_chunks,
    )


def test_what_auto_came_to_is_recorded() -> None:
    layout = describe_environment(built(RecomputeConfig(granularity="auto", memory_gb=1)))
    assert layout["recompute"]["granularity"] == "none" and layout["kernels"]["attention"] == "sdpa"
    assert "auto" not in layout["recompute"].values() and "auto" not in layout["kernels"].values()


def test_a_run_that_goes_on_with_the_same_kernels_by_name_differs_in_nothing() -> None:
    there = describe_environment(built(RecomputeConfig()))
    assert layout_differences(there, describe_environment(built(RecomputeConfig(), attention="sdpa"))) == []
    here = describe_environment(built(RecomputeConfig(granularity="full"), attention="flash"))
    assert layout_differences(there, here) == ["recompute.granularity none -> full", "kernels.attention sdpa -> flash"]
    del there["kernels"]["attention"]
    assert "kernels.attention unknown -> flash" in layout_differences(there, here)
