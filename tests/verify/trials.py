"""Verifications on ranks of the test harness, with or without a bug."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from engine.config import Config, parallel_sizes
from engine.rank_grid import RankGrid
from engine.topology import Topology
from engine.verify.judge import Verdict, judge
from launch.verify import Trial, evidence
from tests.harness import run_ranks

Plant = Callable[[], None]


def observe(
    rank: int,
    config: Config,
    folder: str,
    is_reference: bool,
    plant: Plant | None,
    sites: Sequence[str] | None = None,
) -> None:
    """What a rank of `triaxis verify` does, with a bug in it."""
    from launch import verify_rank

    if plant is not None:
        plant()
    topology = Topology(RankGrid(parallel_sizes(config)), rank, torch.device("cpu"), kv_heads=config.model.kv_heads)
    verify_rank.observe(topology, config, Path(folder), is_reference=is_reference, sites=sites)


def run(asked: Trial, plant: Plant | None = None) -> Verdict:
    """The verdict about a layout whose ranks have the bug."""
    with tempfile.TemporaryDirectory(prefix="triaxis-test-") as folder:
        run_ranks(observe, 1, asked.reference, folder, True, None)
        run_ranks(observe, parallel_sizes(asked.config).world_size, asked.config, folder, False, plant)
        return judge(evidence(asked.config, Path(folder)), asked.tolerance)
