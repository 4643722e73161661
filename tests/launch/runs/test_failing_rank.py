"""A rank that fails in a step ends with its own code, over a backend that notices dead peers and over one that does not.

Four ranks train for real (pp 2, dp 2). The last one runs out of memory in the backward of its second step: peers have posted
messages that nobody will meet any more.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

from tests.fake_nccl import NAME
from tests.harness import forked_ranks
from tests.launch.command_line import ROOT, ended, ranks_of, started, wait_until_gone
from tests.launch.runs.failing_worker import CULPRIT, fail_on_the_last_rank
from triaxis.engine.comm.runtime import Runtime
from triaxis.engine.config.load import ENVIRONMENT

pytestmark = pytest.mark.distributed

CONFIG = (
    str(ROOT / "configs" / "gpt_tiny.yaml"),
    *("data.synthetic=true", "train.steps=1000", "eval.interval=null", "model.seq_length=16"),
    *("parallel.tp=1", "parallel.pp=2", "parallel.vpp=1", "parallel.dp=2", "parallel.sequence_parallel=false"),
    *("checkpoint.interval=never", "telemetry.sample_tokens=0"),
)
WORLD_SIZE = 4
MISTAKE = 2
"""The code for running out of memory: starting again would end the same way."""

ALL_END_SECONDS = 45.0


def train(rank: int, words: Sequence[str], closing_seconds: float, grace_seconds: float) -> None:
    """Be a rank of a training run, and end as one."""
    import triaxis.launch.pretrain_gpt as worker
    import triaxis.launch.rank.join
    import triaxis.launch.start.process.ending

    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    places = {"RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": WORLD_SIZE}
    os.environ.update({name: str(number) for name, number in places.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    triaxis.launch.rank.join.start = lambda environment, config: Runtime(torch.device("cpu"))
    worker.WayOut = lambda: triaxis.launch.start.process.ending.WayOut(grace_seconds)
    fail_on_the_last_rank(rank, closing_seconds)
    triaxis.launch.start.process.ending.run_rank(worker.main, words)


def first_end(
    folder: Path, backend: str, closing_seconds: float = 0.0, grace_seconds: float = 3600.0
) -> tuple[int, str, list[int]]:
    """(rank that ended first with its exit code, its log, exit codes of all once they were told to end and then killed)."""
    words = (*CONFIG, f"runtime.runs_dir={folder}", "runtime.name=fails")
    arguments = (words, closing_seconds, grace_seconds)
    with forked_ranks(train, WORLD_SIZE, arguments, backend=backend) as (processes, _):
        sentinels = {process.sentinel: rank for rank, process in enumerate(processes)}
        [first, *_] = wait(list(sentinels), timeout=ALL_END_SECONDS) or [None]
        assert first is not None, "no rank has ended"
        # As launchers do: SIGTERM, then SIGKILL.
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + 1.0
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        codes = [process.exitcode for process in processes]
    log = folder / "fails" / "logs" / "attempt_00" / f"rank_{CULPRIT:05d}.log"
    return sentinels[first], log.read_text(), codes


@pytest.mark.parametrize("backend", [NAME, pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_rank_that_fails_ends_with_its_own_code(backend: str, tmp_path: Path) -> None:
    first, log, codes = first_end(tmp_path, backend)
    assert (first, codes[CULPRIT]) == (CULPRIT, MISTAKE), log
    assert "rank 3 (pp 1, dp 1, tp 0) is out of" in log and log.count("error: ") == 1
    others = codes[:CULPRIT]
    # gloo tells the others that their peer is gone; those that wait in NCCL must be killed.
    assert all(code in ((1, -9) if backend == "gloo" else (-9,)) for code in others), others


@pytest.mark.slow
def test_a_rank_whose_closing_hangs_ends_with_its_own_code(tmp_path: Path) -> None:
    """As a profiler's would, which waits for the device."""
    first, log, codes = first_end(tmp_path, NAME, closing_seconds=3600.0, grace_seconds=1.0)
    assert (first, codes[CULPRIT]) == (CULPRIT, MISTAKE), log
    assert "closing took longer than 1 seconds" in log


LAUNCH = """\
import os, sys
from pathlib import Path
from triaxis.launch.start.launcher import Request, launch
sys.exit(launch(Request(Path(sys.argv[1]), tuple(sys.argv[2:]), worker="tests.launch.runs.failing_worker"), os.environ))
"""


def wait_until(launcher: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
    """Return as soon as it is so; the launcher must be running until then."""
    while not is_so():
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)


@pytest.mark.slow
def test_the_launcher_ends_all_ranks_with_the_code_of_the_one_that_failed(tmp_path: Path) -> None:
    """torchrun and four processes of their own; the other three wait in a group that does not notice dead peers."""
    words = (*CONFIG, f"runtime.runs_dir={tmp_path}", "runtime.name=fails")
    log = tmp_path / "fails" / "logs" / "attempt_00" / f"rank_{CULPRIT:05d}.log"
    with started(tmp_path, sys.executable, "-c", LAUNCH, *words) as launcher:
        wait_until(launcher, log.exists)
        ranks = list(ranks_of(launcher).values())
        wait_until(launcher, lambda: "is out of memory" in log.read_text())
        failed_seconds = time.monotonic()
        said = ended(launcher, within_seconds=2 * ALL_END_SECONDS)
        assert time.monotonic() - failed_seconds < ALL_END_SECONDS
        assert len(ranks) == WORLD_SIZE and wait_until_gone(ranks, within_seconds=5.0) == []
    assert said.exit_code == MISTAKE, said.err
    assert f"rank {CULPRIT} ended with exit code {MISTAKE}" in said.err
