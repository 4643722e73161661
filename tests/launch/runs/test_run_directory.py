"""The run directory under ranks: starts that fail, folders that cannot be written, a directory that goes away under a live run."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.launch.command_line import ROOT
from tests.launch.forked_ranks import work
from tests.log_lines import without_times
from triaxis.engine.config.load import load_config

pytestmark = pytest.mark.distributed

CONFIG = (
    str(ROOT / "configs" / "gpt_tiny.yaml"),
    *("data.synthetic=true", "eval.interval=null", "model.seq_length=16", "model.num_layers=2"),
    *("model.hidden_size=32", "model.num_attention_heads=2", "model.num_kv_heads=null", "model.vocab_size=257"),
    *(
        "train.global_batch_size=8",
        "optimizer.decay_steps=100",
        "optimizer.warmup_steps=0",
        "telemetry.sample_tokens=0",
    ),
    *("parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=2", "parallel.sequence_parallel=false"),
    *("checkpoint.interval=2", "runtime.name=run"),
)


def train(runs: Path, *words: str, restarts: str = "0") -> tuple[list[int], str]:
    """The exit codes of two ranks, and what rank 0 said besides its log."""
    ended = run_ranks(_rank, 2, [*CONFIG, f"runtime.runs_dir={runs}", *words], restarts)
    return [code for code, *_ in ended], ended[0][2]


def _rank(rank: int, words: Sequence[str], restarts: str) -> tuple[int, str, str]:
    os.environ["SLURM_RESTART_COUNT"] = restarts
    return work(rank, "triaxis.launch.pretrain_gpt", list(words))


def log_of(runs: Path, attempt: int, rank: int = 0) -> str:
    return without_times((runs / "run" / "logs" / f"attempt_{attempt:02d}" / f"rank_{rank:05d}.log").read_text())


def test_a_start_that_fails_leaves_the_run_to_the_original_command(tmp_path: Path) -> None:
    """Attempt 1 leaves out samples that were trained on; attempt 2 loads what is not there; attempt 3 is the original command."""
    assert train(tmp_path, "train.steps=2")[0] == [0, 0]
    too_late = ("train.steps=4", "data.skip_samples=[[0,4]]", "checkpoint.accept=[data.skip_samples]")
    assert train(tmp_path, *too_late)[0] == [2, 2]
    assert "leaves out samples before" in log_of(tmp_path, 1)
    assert (tmp_path / "run" / "finished").exists(), "the first two steps are still what this run came to"
    assert train(tmp_path, *too_late, "checkpoint.load=/nowhere", "--from-scratch")[0] == [2, 2]
    assert "/nowhere" in log_of(tmp_path, 2)
    assert train(tmp_path, "train.steps=4")[0] == [0, 0]
    assert "resuming after step 2" in log_of(tmp_path, 3)
    assert load_config(tmp_path / "run" / "config.yaml").train.steps == 4


@pytest.mark.slow  # the directory's part is in tests/engine/run/test_entries.py
def test_a_restart_starts_over_where_the_first_start_failed(tmp_path: Path) -> None:
    assert train(tmp_path, "train.steps=2")[0] == [0, 0]
    assert train(tmp_path, "train.steps=2", "checkpoint.load=/nowhere", "--from-scratch")[0] == [2, 2]
    for attempt, words in ((2, "from scratch: earlier checkpoints were moved"), (3, "resuming after step 2")):
        assert train(tmp_path, f"train.steps={attempt}", "--from-scratch", restarts="1")[0] == [0, 0]
        assert words in log_of(tmp_path, attempt)


def test_no_rank_waits_where_rank_0_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    codes, said = train(tmp_path / "file" / "runs")
    assert codes == [2, 2]
    assert "file is not a folder. Set runtime.runs_dir to a folder that this user can write" in said


def test_a_rank_that_cannot_write_its_log_is_named(tmp_path: Path) -> None:
    """On its node the folder is another one; here a folder is in the place of the file."""
    ended = run_ranks(_rank_without_log, 2, [*CONFIG, f"runtime.runs_dir={tmp_path}", "train.steps=2"])
    assert [code for code, *_ in ended] == [2, 2]
    assert "rank 1: " in ended[0][2] and "cannot be used for the log of a rank" in ended[0][2]


def _rank_without_log(rank: int, words: Sequence[str]) -> tuple[int, str, str]:
    from triaxis.engine.run.directory import RunDirectory

    if rank == 1:
        RunDirectory.rank_log = lambda self, rank: Path("/proc/self/nowhere/log")  # type: ignore[method-assign]
    return _rank(rank, words, "0")
