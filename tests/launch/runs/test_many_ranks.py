"""Thousands of ranks on paper: what a rank does at its start and in a step does not grow with their number.

Worlds of 64 and 2,048 ranks with the same tp and pp differ in dp alone, and each replica has as many microbatches. Numbers
that are written here are exact.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.on_paper import Seen, run_on_paper
from triaxis.engine.config.load import load_config
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.indexed import IndexedWriter
from triaxis.engine.step import Engine
from triaxis.engine.telemetry.timing.clock_offsets import NUM_ROUNDS
from triaxis.engine.train import build
from triaxis.launch import pretrain_gpt

pytestmark = pytest.mark.distributed

TP, PP = 8, 4
MICROBATCHES = 4
WORLDS = (64, 2048)
CONFIG = """
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 8, ffn_hidden_size: 128, seq_length: 16, vocab_size: 257}
telemetry: {log_interval: 2}
checkpoint: {interval: never}
"""
BETWEEN_LINES = 2
ROW = 16 + BETWEEN_LINES * (6 + 2 * 2 * MICROBATCHES)
"""Numbers that a rank tells before a line: of itself, of each step, and wait and duration of each forward and backward."""


class Runs:
    """Runs of single ranks, made when they are asked for, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "small.yaml").write_text(CONFIG)
        with IndexedWriter(folder / "corpus", np.uint16) as writer:
            for _ in range(64):
                writer.add_document(np.arange(2000) % 256)  # more than the largest world reads
        self._made: dict[tuple[int, int, int, bool, bool], Seen] = {}
        self.of(2, WORLDS[0])  # builds the caches of the corpus

    def of(
        self, rank: int, world_size: int, steps: int = 4, *, has_timeline: bool = False, is_auto: bool = False
    ) -> Seen:
        key = (rank, world_size, steps, has_timeline, is_auto)
        if key not in self._made:
            dp = world_size // (TP * PP)
            overrides = {
                "parallel.tp": TP,
                "parallel.pp": PP,
                "parallel.dp": dp,
                "train.micro_batch_size": 1,
                "train.global_batch_size": MICROBATCHES * dp,
                "train.steps": steps,
                "data.train": str(self.folder / "corpus"),
                "data.split": "[1, 0, 0]",
                "runtime.runs_dir": self.folder / "-".join(map(str, key)),
            }
            if has_timeline:
                overrides |= {"telemetry.timeline.start": 2, "telemetry.timeline.steps": 1}
            if is_auto:
                overrides |= {"recompute.granularity": "auto", "recompute.memory_gb": 1}
            words = [f"{name}={value}" for name, value in overrides.items()]
            self._made[key] = run_on_paper(self.folder / "small.yaml", words, rank, world_size)
        return self._made[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("on-paper"))


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_rank_makes_its_own_groups_and_no_others(runs: Runs, world_size: int) -> None:
    """World, tp, dp, pp and the two directions; on rank 0 also the two ends of its pipeline."""
    dp = world_size // (TP * PP)
    assert runs.of(world_size // 2 + 1, world_size).groups == [world_size, TP, dp, PP, PP, PP]
    assert runs.of(0, world_size).groups == [world_size, TP, dp, PP, PP, PP, 2]
    # What the backends ask the store is in tests/engine/comm/test_store_requests.py; a barrier over the store would be here.
    assert not runs.of(0, world_size).requests


@pytest.mark.parametrize("is_first", [False, True])
def test_a_rank_opens_the_same_files_in_every_world(runs: Runs, is_first: bool) -> None:
    """Configuration, the newest checkpoint's name, its log, its heartbeat, the corpus and its cache; rank 0 also what a run leaves.

    The log is opened once more before all ranks agree that each can write its own.
    """
    seen = [runs.of(0 if is_first else world_size // 2 + 1, world_size) for world_size in WORLDS]
    opened = [[Path(path).name for path in each.files] for each in seen]
    own = [[name for name in names if not name.startswith("rank_") and not name.isdigit()] for names in opened]
    assert own[0] == own[1]
    assert [len(names) for names in opened] == [len(opened[0])] * 2
    assert len({len(each.listings) for each in seen}) == 1
    own_files = [path for path in seen[0].files if path.startswith((str(runs.folder), "/dev/shm"))]
    assert len(own_files) == (24 if is_first else 11), "\n".join(own_files)


def test_an_engine_is_built_from_what_auto_came_to_and_the_run_keeps_what_was_asked(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Config] = []

    def build_and_note(config: Config, *rest: Any, **named: Any) -> Engine:
        built.append(config)
        return build(config, *rest, **named)

    monkeypatch.setattr(pretrain_gpt, "build", build_and_note)
    runs.of(0, WORLDS[0], is_auto=True)
    assert [config.recompute for config in built] == [
        RecomputeConfig(gathered_inputs="regather", gathered_kv="regather", head_tokens=None)
    ]
    (asked,) = runs.folder.glob("*-True/*/config.yaml")
    assert load_config(asked).recompute == RecomputeConfig(granularity="auto", memory_gb=1)


def test_a_step_opens_no_file(runs: Runs) -> None:
    """Eight steps against four; rank 0's metrics and events stay open."""
    for rank in (0, 33):
        few, many = (runs.of(rank, 64, steps=steps).files for steps in (4, 8))
        assert len(many) == len(few), "\n".join(sorted(set(many) - set(few)))


def test_rank_0_alone_receives_more_where_there_are_more_ranks(runs: Runs) -> None:
    """Bytes for a line, for the names of hosts and for the peaks of memory: 8 per number, 64 per name."""
    for world_size in WORLDS:
        dp = world_size // (TP * PP)
        others = {"telemetry": 8 * ROW, "hosts": 64, "peak memory": 8}
        first = runs.of(0, world_size).received_bytes
        inner = runs.of(world_size // 2 + 1, world_size).received_bytes
        assert {name: inner[name] for name in others} == {name: (TP - 1) * row for name, row in others.items()}
        received = (TP - 1) + TP * (PP - 1) + TP * PP * (dp - 1)
        assert received == world_size - 1
        assert {name: first[name] for name in others} == {name: received * row for name, row in others.items()}


def test_a_rank_makes_as_many_calls_in_every_world(runs: Runs) -> None:
    for rank_of in (lambda world_size: 0, lambda world_size: world_size // 2 + 1):
        calls = [[(call.op, call.axis, call.purpose) for call in runs.of(rank_of(w), w).calls] for w in WORLDS]
        assert calls[0] == calls[1]


def test_comparing_clocks_for_a_timeline_brings_no_more_to_a_rank(runs: Runs) -> None:
    small, large = (runs.of(world_size // 2 + 1, world_size, has_timeline=True) for world_size in (64, 2048))
    assert [call.purpose for call in small.calls].count("clocks") == NUM_ROUNDS + 1
    received = [
        {name: size for name, size in seen.received_bytes.items() if name != "parameters"} for seen in (small, large)
    ]
    assert received[0] == received[1] and len(small.files) == len(large.files)
