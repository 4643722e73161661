"""The benchmark of measuring runs, and counts the marks of a step (counted, never timed)."""

import re
import subprocess
import sys

import pytest

from benchmarks import telemetry_overhead
from tests.launch.command_line import ROOT

NO_PIPELINE = [f"parallel.{size}=1" for size in ("pp", "vpp", "dp")]
ONE_RANK = ["parallel.tp=1", *NO_PIPELINE, "parallel.sequence_parallel=false"]
TOY = ["model.num_layers=1", "model.seq_length=16", "model.hidden_size=32", "train.global_batch_size=8"]
WITHOUT_WAITS = 2 + 3 + 5
"""Where a step ends: one mark for the phase between steps, one for the end and the next beginning. Then three phases, two forwards,
two backwards and the end of the program."""


def test_one_rank_without_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*ONE_RANK, *TOY, "telemetry.log_interval=2"]
    result = telemetry_overhead.run(["configs/gpt_tiny.yaml", *overrides, "--steps", "3"])
    assert result.marks_per_step == WITHOUT_WAITS
    assert 0.0 < result.seconds_per_mark < 1e-3
    counted_seconds = result.marks_per_step * result.seconds_per_mark + result.attribution_seconds
    assert 0.0 < result.attribution_seconds < 0.1 and result.counted == counted_seconds / result.plain_cpu_seconds
    assert f"{result.counted:.3%}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.distributed
def test_waits_for_another_rank_are_counted() -> None:
    words = ["-m", "benchmarks.telemetry_overhead", "configs/gpt_tiny.yaml", *NO_PIPELINE, *TOY, "--steps", "2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = subprocess.run([*launcher, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    (marks,) = re.findall(r"(\d+) x", said.stdout)
    assert int(marks) > 2 * WITHOUT_WAITS
