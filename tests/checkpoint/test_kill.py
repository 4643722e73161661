"""SIGKILL at any moment of a save: there is always a complete newest checkpoint, and the next attempt goes on from it."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.checkpoint.runs import run
from tests.harness import RankFailedError, run_ranks
from tests.parity.cases import Case
from triaxis.engine.checkpoint.directory import CheckpointDirectory

pytestmark = pytest.mark.distributed

CASE = Case("gpt", dp=2, global_batch_size=2)
SECTION = {"interval": 1, "keep_last": 2}
"""A save at every step: whenever the kill comes, one is under way."""

ENDLESS = 10_000
LONGEST_DELAY_SECONDS = 0.15
"""Several saves long, each made of many writes, fsyncs and renames."""


def _until_killed(rank: int, folder: str, attempt: int, delay_seconds: float) -> None:
    """Train and save; once a save of this attempt is complete, die `delay_seconds` later."""
    directory = CheckpointDirectory(Path(folder))
    if rank == 0:
        directory.sweep()
    before = directory.latest()

    def kill() -> None:
        while directory.latest() == before:
            time.sleep(0.001)
        time.sleep(delay_seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    run(rank, CASE, folder, ENDLESS, attempt, SECTION)


@pytest.mark.parametrize(
    ("num_kills", "seed"), [pytest.param(5, 1, id="5"), pytest.param(50, 2, id="50", marks=pytest.mark.slow)]
)
def test_a_kill_during_a_save_loses_nothing_that_was_saved(num_kills: int, seed: int, tmp_path: Path) -> None:
    delays = random.Random(seed)
    directory = CheckpointDirectory(tmp_path)
    newest = 0
    half_written = 0
    for attempt in range(num_kills):
        # Both ranks die of it; which of them the harness sees first is a matter of luck.
        with pytest.raises(RankFailedError, match=r"exit code -9|Connection|reset|closed"):
            run_ranks(_until_killed, 2, str(tmp_path), attempt, delays.uniform(0, LONGEST_DELAY_SECONDS))
        half_written += any(tmp_path.glob("step_*.attempt_*"))
        damaged: list[str] = []
        candidate = next(directory.candidates(damaged))
        assert not damaged, "what bears a finished name is complete"
        assert candidate.manifest.state.step > newest, "an attempt goes on from where the last one was"
        newest = candidate.manifest.state.step
        (trace,) = run_ranks(run, 1, Case("gpt", global_batch_size=2), str(tmp_path), newest, attempt, {}, (newest,))
        assert trace.began == newest and trace.fingerprints == {newest: candidate.manifest.fingerprint}
    assert half_written, "no kill came during a save: the test shows nothing"
