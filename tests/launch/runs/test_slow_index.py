"""A build of an epoch's order that takes ten times as long as ranks may stand still: no hang, and a kill costs one piece."""

import re
import sys
import time
from pathlib import Path

import pytest

from tests.launch.command_line import ROOT, ended, ranks_of, records, run, started

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LAUNCH = """\
import os, sys
from pathlib import Path
from triaxis.launch.start.launcher import Request, launch
worker = "tests.launch.runs.slow_index_worker"
sys.exit(launch(Request(Path(sys.argv[1]), tuple(sys.argv[2:]), worker=worker, trains=True), os.environ))
"""

NUM_DOCUMENTS = 1200
BATCH = 256
WORDS = (
    str(ROOT / "configs" / "gpt_tiny.yaml"),
    *("data.train=[{path: docs, weight: 1, name: docs}]", "data.split=[1,0,0]", "model.seq_length=16"),
    *(
        f"train.global_batch_size={BATCH}",
        "train.micro_batch_size=64",
        "train.steps=12",
        "eval.interval=null",
        "optimizer.warmup_steps=0",
    ),
    *("parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=2", "parallel.sequence_parallel=false"),
    *("telemetry.sample_tokens=0", "checkpoint.interval=never", "runtime.name=slow", "runtime.hang_seconds=1"),
)


def test_no_hang_is_reported_and_a_kill_costs_one_piece(tmp_path: Path) -> None:
    text = tmp_path / "docs.jsonl"
    text.write_text("".join(f'{{"text": "document {number:06d}"}}\n' for number in range(NUM_DOCUMENTS)))
    prepare = (sys.executable, "-m", "triaxis.launch.cli", "prepare", "--tokenizer", "bytes")
    made = run(tmp_path, *prepare, "--input", text.name, "--output", "docs")
    assert made.exit_code == 0, made.err
    cache = tmp_path / "docs.cache"

    with started(tmp_path, sys.executable, "-c", LAUNCH, *WORDS) as launcher:
        deadline = time.monotonic() + 90.0
        while not (found := pieces(cache)) or found < 6:
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for rank in ranks_of(launcher).values():
            rank.kill()
        ended(launcher, within_seconds=60.0)
    kept = pieces(cache)
    assert kept >= 6

    said = run(tmp_path, sys.executable, "-c", LAUNCH, *WORDS)
    assert said.exit_code == 0, said.err
    folder = tmp_path / "runs" / "slow"
    assert [record["step"] for record in records(folder / "metrics.jsonl")] == list(range(1, 13))
    assert not list(folder.glob("hangs/*/report.json")) and "hangs in step" not in said.err + said.out
    told = [int(done) for done in re.findall(r"building the order .*?: (\d+) of \d+ pieces", said.err)]
    assert told and (folder / "logs").exists()
    assert len(list(cache.glob("*.index"))) >= 2, "a later epoch was built under the watch"


def pieces(cache: Path) -> int:
    """Pieces of the first order that are done."""
    done = [re.search(r'"done": (\d+)', path.read_text()) for path in cache.glob("*.done")]
    return max((int(match[1]) for match in done if match), default=0)
