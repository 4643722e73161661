"""Verifications on ranks of the test harness, with or without a bug."""

import hashlib
import shutil
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


def written_once(kept: Path, name: str, write: Callable[[str], object], to: Path) -> None:
    """Copy to `to` what `write(folder)` writes; what bears that name in `kept` is not written again."""
    source = kept / hashlib.sha256(name.encode()).hexdigest()
    if not source.exists():
        unfinished = tempfile.mkdtemp(dir=kept)
        write(unfinished)
        Path(unfinished).rename(source)
    shutil.copytree(source, to, dirs_exist_ok=True)


def run(asked: Trial, references: Path, plant: Plant | None = None) -> Verdict:
    """The verdict about a layout whose ranks have the bug; `references`: a folder for what one process writes."""
    with tempfile.TemporaryDirectory(prefix="triaxis-test-") as name:
        folder = Path(name)
        one = asked.reference

        def refer(where: str) -> None:
            run_ranks(observe, 1, one, where, True, None)

        written_once(references, one.model_dump_json(), refer, folder)
        run_ranks(observe, parallel_sizes(asked.config).world_size, asked.config, name, False, plant)
        return judge(evidence(asked.config, folder), asked.tolerance)
