"""Saving and loading a checkpoint compared with `dd` and torch.distributed.checkpoint.

Each round measures, in turns on the same disk, with as many files as ranks and as many bytes as the state has:

    write   dd conv=fsync          our save until it is committed                     dcp.save, files synced
    read    dd                     our load: read, hashes checked, put in place       dcp.load

All ranks of a round work at once, and a round's time is that of its slowest rank. Before anything is read its pages are dropped
from the cache (posix_fadvise), so that the disk is read and not the memory. Medians over the rounds, and the ratios of each
round to its own `dd`. How long a save stops training is in a run's own log.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.checkpoint --gib 2
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

from benchmarks.records import machine
from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.format.manifest import Kind, read_manifest
from triaxis.engine.checkpoint.format.store import load
from triaxis.engine.checkpoint.saving import CheckpointSaver, RunFacts
from triaxis.engine.checkpoint.shards import saved_buckets, shards
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.config.tree import Config
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS
from triaxis.engine.errors import counted
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.launch.rank.join import Rank, join
from triaxis.launch.start.process.ending import run_rank
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import model_specs

HIDDEN = 1024
BYTES_PER_PARAMETER = 12
"""fp32 weights and two moments."""

DD_BLOCK_BYTES = 32 * 2**20


class Watch:
    """Notices that remember why a save failed."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def on_save_started(self, step: int, stall_seconds: float, waited_seconds: float) -> None:
        pass

    def on_saved(self, step: int, folder: Path, num_bytes: int, seconds: float) -> None:
        pass

    def on_save_failed(self, step: int, reason: str) -> None:
        self.problems.append(reason)

    def on_retired(self, names: list[str]) -> None:
        pass

    def on_fingerprint(self, step: int, fingerprint: dict[Kind, str]) -> None:
        pass


def make_config(gib: float, world_size: int) -> Config:
    """Build the config of a GPT whose fp32 state has at least `gib` GiB, data parallel over all ranks."""
    per_layer = 12 * HIDDEN**2
    layers = max(1, -(-int(gib * 2**30 / BYTES_PER_PARAMETER) // per_layer))
    heads = HIDDEN // 64
    return Config.model_validate(
        {
            "model": {
                "num_layers": layers,
                "hidden_size": HIDDEN,
                "num_attention_heads": heads,
                "seq_length": 128,
                "vocab_size": 257,
            },
            "data": {"synthetic": True},
            "train": {"steps": 10**6, "global_batch_size": world_size},
            "parallel": {"dp": world_size},
            "precision": {"dtype": "fp32"},
            "checkpoint": {"interval": 1, "keep_last": 1},
        }
    )


class Contest:
    """The measurements of one rank.

    Args:
        rank: connected.
        engine: whose state is saved.
        folder: on the disk that is measured; emptied between measurements.
    """

    def __init__(self, rank: Rank, engine: Engine, folder: Path) -> None:
        self.rank, self.engine, self.folder = rank, engine, folder
        self.world = rank.topology.axis("world")
        self.watch = Watch()
        facts = RunFacts("benchmark", 0, {}, (), lambda: None, model_specs(engine.config.model))
        self.directory = CheckpointDirectory(folder / "ours")
        self.checkpoints = CheckpointSaver(engine, self.directory, facts, self.watch)
        self.flats = [
            owned.state.read(kind)
            for owned in saved_buckets(engine.optimizer)
            for kind in OPTIMIZERS["adamw"].state_kinds
        ]
        self.targets = [
            shard
            for owned in saved_buckets(engine.optimizer)
            for kind in OPTIMIZERS["adamw"].state_kinds
            for shard in shards(owned, owned.state.read(kind), kind)
        ]
        self.num_bytes = sum(flat.numel() * flat.element_size() for flat in self.flats)

    def together(self, work: Callable[[], None]) -> float:
        """Return the seconds of the slowest rank."""
        self.world.barrier(self.rank.topology.device, "benchmark")
        started = time.perf_counter()
        work()
        mine = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        return float(self.world.all_reduce(mine, "benchmark", op="max").wait())

    def round(self, step: int) -> dict[str, float]:
        """Return seconds by name. The first side changes from round to round: a disk may be faster after a rest."""
        times: dict[str, float] = {}
        sides = [
            ("dd", self.dd_write, self.dd_read),
            ("our", lambda: self.save(step), self.load),
            ("dcp", self.dcp_save, self.dcp_load),
        ]
        for side, write, read in sides[step % 3 :] + sides[: step % 3]:
            times[f"{side} save"] = self.together(write)
            drop(self.folder)
            times[f"{side} load"] = self.together(read)
            self.clear()
        return times

    def clear(self) -> None:
        """Empty the folder for the next measurement, with nothing left to be written."""
        self.world.barrier(self.rank.topology.device, "benchmark")
        if self.rank.number == 0:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            os.sync()
        self.world.barrier(self.rank.topology.device, "benchmark")

    @property
    def dd_file(self) -> Path:
        return self.folder / f"dd_{self.rank.number}"

    def dd_write(self) -> None:
        count = -(-self.num_bytes // DD_BLOCK_BYTES)
        words = ["if=/dev/zero", f"of={self.dd_file}", f"bs={DD_BLOCK_BYTES}", f"count={count}", "conv=fsync"]
        subprocess.run(["dd", *words], check=True, capture_output=True)

    def dd_read(self) -> None:
        words = [f"if={self.dd_file}", "of=/dev/null", f"bs={DD_BLOCK_BYTES}"]
        subprocess.run(["dd", *words], check=True, capture_output=True)

    def save(self, step: int) -> None:
        self.checkpoints.after_step(step, step, 0.0, is_last=True)
        self.checkpoints.finish()

    def load(self) -> None:
        latest = self.directory.latest()
        assert latest is not None
        load(latest, read_manifest(latest), self.targets)

    def dcp_state(self) -> dict[str, torch.Tensor]:
        return {f"rank_{self.rank.number}.{number}": flat for number, flat in enumerate(self.flats)}

    def dcp_save(self) -> None:
        writer = dcp.FileSystemWriter(self.folder / "dcp", single_file_per_rank=True, sync_files=True)
        dcp.save(self.dcp_state(), storage_writer=writer, no_dist=self.world.size == 1)

    def dcp_load(self) -> None:
        dcp.load(
            self.dcp_state(), storage_reader=dcp.FileSystemReader(self.folder / "dcp"), no_dist=self.world.size == 1
        )


def drop(folder: Path) -> None:
    """Take the folder's files out of the page cache: they are on the disk already."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def show(rounds: list[dict[str, float]], num_bytes: float, num_ranks: int, console: Console) -> None:
    """Print one table: medians, and the medians of each round's own ratios."""
    table = Table(
        title=f"{num_bytes / 2**30:.2f} GiB in {counted(num_ranks, 'file')}, medians of {counted(len(rounds), 'round')}"
    )
    for name, justify in (("", "left"), ("seconds", "right"), ("GB/s", "right"), ("of dd's speed", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for kind in ("save", "load"):
        for side in ("dd", "our", "dcp"):
            seconds = statistics.median(one[f"{side} {kind}"] for one in rounds)
            ratio = statistics.median(one[f"dd {kind}"] / one[f"{side} {kind}"] for one in rounds)
            table.add_row(f"{side} {kind}", f"{seconds:.3f}", f"{num_bytes / seconds / 1e9:.3f}", f"{ratio:.2f}")
        table.add_section()
    console.print(table)


def main(argv: list[str]) -> int:
    """Run it on every rank; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state, all ranks together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/benchmarks/checkpoint"), help="on the disk to measure"
    )
    options = parser.parse_args(argv)
    environment = RankEnvironment.from_variables(os.environ)
    config = make_config(options.gib, environment.world_size)
    with join(config, environment) as rank:
        engine = build(resolve_recompute(config, rank.topology.sizes), rank.topology, build_chunks)
        options.folder.mkdir(parents=True, exist_ok=True)
        contest = Contest(rank, engine, options.folder)
        contest.clear()
        rounds = []
        for step in range(1, options.rounds + 1):
            rounds.append(contest.round(step))
            if rank.number == 0:
                print("  ".join(f"{name} {seconds:.2f}" for name, seconds in rounds[-1].items()), flush=True)
        contest.checkpoints.close()
        (num_bytes,) = contest.world.sum_values([contest.num_bytes], rank.topology.device, "benchmark")
        if contest.watch.problems:
            print("; ".join(contest.watch.problems), file=sys.stderr)
            return 1
        if rank.number == 0:
            console = Console()
            console.print(" ".join(f"{key} {value}" for key, value in machine().items()), style="dim")
            show(rounds, num_bytes, rank.topology.grid.world_size, console)
            shutil.rmtree(options.folder)
    return 0


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
