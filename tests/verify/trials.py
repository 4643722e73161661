"""Verifications on ranks of the test harness, with or without a bug."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.harness import RankFailedError, run_ranks
from tests.planting import Plant, run_planted
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.launch.verify.run import Trial, evidence
from triaxis.launch.verify.sweep import attributed
from triaxis.launch.verify.verdict.evidence import Evidence
from triaxis.launch.verify.verdict.judge import Verdict, judge


def observe(
    rank: int,
    config: Config,
    folder: str,
    is_reference: bool,
    sites: Sequence[str] | None = None,
    noise_of: str | None = None,
) -> None:
    """Run a rank of `triaxis verify`."""
    from triaxis.launch.verify import rank as verify_rank

    topology = Topology(
        RankGrid(parallel_sizes(config)),
        rank,
        torch.device("cpu"),
        kv_heads=config.model.kv_heads,
        has_experts=config.model.has_experts,
    )
    verify_rank.observe(topology, config, Path(folder), is_reference=is_reference, sites=sites, noise_of=noise_of)


def written_once(kept: Path, name: str, write: Callable[[str], object], to: Path) -> None:
    """Copy to `to` what `write(folder)` writes; what bears that name in `kept` is not written again."""
    source = kept / hashlib.sha256(name.encode()).hexdigest()
    if not source.exists():
        unfinished = tempfile.mkdtemp(dir=kept)
        write(unfinished)
        Path(unfinished).rename(source)
    shutil.copytree(source, to, dirs_exist_ok=True)


def run(asked: Trial, references: Path, plant: Plant | None = None, *, sub_layouts: bool = True) -> Verdict:
    """Return the verdict about a layout whose ranks have the bug, as `triaxis verify` finds it.

    Args:
        asked: what is verified.
        references: a folder for what one process writes.
        plant: the bug; its code has to run in the layout, and need not in a part of it.
        sub_layouts: run them where something differs, to name the axis.
    """
    with tempfile.TemporaryDirectory(prefix="triaxis-test-") as name:
        folder = Path(name)

        def refer(where: str) -> None:
            run_ranks(observe, 1, asked.reference, where, True)
            if asked.noise is not None:
                run_ranks(observe, 1, asked.noise, where, False, None, asked.reference.precision.dtype)

        written_once(references, asked.reference.model_dump_json(), refer, folder)

        def seen(config: Config, *, must_run: bool = False) -> Evidence:
            for report in folder.glob("rank_*.json"):
                report.unlink()
            world_size = parallel_sizes(config).world_size
            run_planted(plant, observe, world_size, config, name, False, must_run=must_run, timeout_seconds=30.0)
            return evidence(config, folder)

        def is_equal(config: Config) -> bool | None:
            try:
                return judge(seen(config), asked.tolerance).equal
            except RankFailedError:
                return None

        found = seen(asked.config, must_run=True)
        verdict = judge(found, asked.tolerance)
        return attributed(asked.config, found, verdict, is_equal) if sub_layouts else verdict
