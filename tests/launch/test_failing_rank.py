"""A rank that fails in a step ends with its own code, over a backend that notices dead peers and over one that does not.

Four ranks train for real (pp 2, dp 2). The last one runs out of memory in the backward of its second step: peers have posted
messages that nobody will meet any more.
"""

import os
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config_load import ENVIRONMENT
from engine.runtime import Runtime
from tests.fake_nccl import NAME
from tests.harness import forked_ranks
from tests.launch.command_line import ROOT

pytestmark = pytest.mark.distributed

CONFIG = (
    str(ROOT / "configs" / "gpt_tiny.yaml"),
    *("data.synthetic=true", "train.steps=1000", "train.eval_interval=null", "model.seq_length=16"),
    *("parallel.tp=1", "parallel.pp=2", "parallel.vpp=1", "parallel.dp=2", "parallel.sequence_parallel=false"),
    *("checkpoint.interval=null", "telemetry.sample_tokens=0"),
)
WORLD_SIZE = 4
CULPRIT = 3
MISTAKE = 2
"""The code for running out of memory: starting again would end the same way."""

ALL_END_SECONDS = 45.0


class Failing:
    """A watcher of a rank's steps that raises in its second one; then closing it takes `closing_seconds`."""

    def __init__(self, closing_seconds: float) -> None:
        self._closing_seconds = closing_seconds
        self._step = 0

    def phase(self, name: str) -> None:
        self._step += name == "data"

    def instruction(self, instruction: object) -> None:
        if self._step == 2 and str(instruction) == "0B1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")

    def close(self) -> None:
        time.sleep(self._closing_seconds)


def train(rank: int, words: Sequence[str], closing_seconds: float, grace_seconds: float) -> None:
    """Be a rank of a training run, and end as one."""
    import launch.ending
    import launch.pretrain_gpt as worker
    import launch.rank

    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    places = {"RANK": rank, "WORLD_SIZE": WORLD_SIZE, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": WORLD_SIZE}
    os.environ.update({name: str(number) for name, number in places.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    launch.rank.start = lambda environment, config: Runtime(environment, torch.device("cpu"))
    worker.WayOut = lambda: launch.ending.WayOut(grace_seconds)
    open_watchers = worker.open_watchers

    def with_one_more(*args: Any) -> list[Any]:
        watchers = open_watchers(*args)
        if rank == CULPRIT:
            watchers.append(Failing(closing_seconds))
        return watchers

    worker.open_watchers = with_one_more
    launch.ending.run_rank(worker.main, words)


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
        deadline = time.monotonic() + 3.0
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        codes = [process.exitcode for process in processes]
    log = folder / "fails" / "logs" / "attempt_00" / f"rank_{CULPRIT:05d}.log"
    return sentinels[first], log.read_text(), codes


@pytest.mark.parametrize("backend", ["gloo", NAME])
def test_a_rank_that_fails_ends_with_its_own_code(backend: str, tmp_path: Path) -> None:
    first, log, codes = first_end(tmp_path, backend)
    assert (first, codes[CULPRIT]) == (CULPRIT, MISTAKE), log
    assert "rank 3 (pp 1, dp 1, tp 0) is out of" in log and log.count("error: ") == 1
    others = codes[:CULPRIT]
    # gloo tells the others that their peer is gone; those that wait in NCCL must be killed.
    assert all(code in ((1, -9) if backend == "gloo" else (-9,)) for code in others), others


def test_a_rank_whose_closing_hangs_ends_with_its_own_code(tmp_path: Path) -> None:
    """As a profiler's would, which waits for the device."""
    first, log, codes = first_end(tmp_path, NAME, closing_seconds=3600.0, grace_seconds=1.0)
    assert (first, codes[CULPRIT]) == (CULPRIT, MISTAKE), log
    assert "closing takes longer than 1 seconds" in log
