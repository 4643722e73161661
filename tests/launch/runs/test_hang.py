"""A run of 4 ranks of which one stands still: the report names it and who waits for what, and the job ends in bounded time."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.launch.command_line import PRETRAIN, ROOT, ended, events, ranks_of, started, wait_for_steps, wait_until_gone
from triaxis.engine.errors import ExitCode
from triaxis.engine.resilience.hang.heartbeat import folders_of
from triaxis.engine.resilience.hang.watch import HangLimits, hang_report

pytestmark = pytest.mark.distributed

HANG_SECONDS = 5.0
STOPPED = 3

ENDLESS = (
    str(ROOT / "configs" / "gpt_tiny.yaml"),
    "data.synthetic=true",
    "train.steps=100000",
    "eval.interval=null",
    "telemetry.sample_tokens=0",
    "checkpoint.interval=never",
    f"runtime.hang_seconds={HANG_SECONDS}",
)


def test_a_stopped_rank_is_named_and_the_job_ends(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "stops"
    with started(tmp_path, *PRETRAIN, *ENDLESS, TP="1", PP="2", VPP="1", DP="2", RUN_NAME="stops") as launcher:
        wait_for_steps(launcher, run / "metrics.jsonl", 3)
        ranks = ranks_of(launcher)
        ranks[STOPPED].send_signal(signal.SIGSTOP)
        stopped_seconds = time.monotonic()
        said = ended(launcher, within_seconds=60.0)
        took_seconds = time.monotonic() - stopped_seconds
        assert wait_until_gone(list(ranks.values()), within_seconds=5.0) == [], "a stopped process hears SIGKILL alone"
    assert said.exit_code == ExitCode.HUNG
    assert took_seconds < HangLimits.after(HANG_SECONDS, 600.0).end_seconds + 20.0, "torchrun's own end is in it"

    report = hang_report(run / "hangs" / "attempt_00")
    assert report is not None and report["culprits"] == [STOPPED] and report["reporter"] == 0
    text = report["text"]
    # SIGSTOP may come at any moment of a step: inside a phase or an action, between two actions, or while data is read.
    place = r"; \S+, pid \d+\)"
    seen = rf"rank {STOPPED} \(pp 1, dp 1, tp 0{place} does not answer; it was last seen (in the|between|reading the) .*step \d+"
    assert re.search(seen, text), text
    # Rank 1 is the other stage of its pipeline. It waits for a message, until its own is taken, or in a call of all ranks
    # to which rank 2, which waits for its replica's gradients, has not come either ("ranks 2, 3").
    waits = rf"  rank 1 \(pp 0, dp 1, tp 0{place} waits .*(rank {STOPPED}\b|ranks (\d+, )*{STOPPED}\b)"
    lines = text.splitlines()
    assert any(re.match(waits, line) for line in lines), text
    assert text.splitlines()[1] in said.out + said.err
    assert lines[-1].startswith("  next: ") and "same command" in lines[-1]
    [event] = [event for event in events(run) if event["kind"] == "hang"]
    assert event["rank"] == 0 and event["report"] == text and event["message"] in lines[1]
    for folder in folders_of(run):
        assert not list(folder.glob("rank_*")), "nothing is left in shared memory"
