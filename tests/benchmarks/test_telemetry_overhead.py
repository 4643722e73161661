"""The benchmark of measuring runs, and counts the marks of a step (counted, never timed)."""

import pytest

from benchmarks import telemetry_overhead

ONE_RANK = [f"parallel.{size}=1" for size in ("tp", "pp", "vpp", "dp")]
TOY = ["model.num_layers=1", "model.seq_length=16", "model.hidden_size=32", "train.global_batch_size=8"]


def test_one_rank_without_a_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*ONE_RANK, "parallel.sequence_parallel=false", *TOY, "telemetry.log_interval=2"]
    result = telemetry_overhead.run(["configs/gpt_tiny.yaml", *overrides, "--rounds", "3"])
    printed = capsys.readouterr().out
    # Where a step ends: one mark for the phase between steps, one for the end and the next beginning. Then three phases, two
    # forwards, two backwards and the end of the program. One rank waits for nothing.
    assert result.marks_per_step == 2 + 3 + 5
    assert 0.0 < result.seconds_per_mark < 1e-3 and result.plain_seconds > 0.0
    counted_seconds = result.marks_per_step * result.seconds_per_mark + result.attribution_seconds
    assert 0.0 < result.attribution_seconds < 0.1 and result.counted == counted_seconds / result.plain_cpu_seconds
    assert result.num_rounds == 3
    assert f"{1 + result.counted:.5f}" in printed and str(result.wall_ratio) in printed
    assert result.cpu_ratio.low <= result.cpu_ratio.median <= result.cpu_ratio.high
    assert str(result.control_cpu_ratio) in printed


@pytest.mark.slow
def test_no_round_begins_when_the_time_is_up_but_an_interval_needs_some() -> None:
    overrides = [*ONE_RANK, "parallel.sequence_parallel=false", *TOY]
    result = telemetry_overhead.run(["configs/gpt_tiny.yaml", *overrides, "--rounds", "1000", "--seconds", "0"])
    assert result.num_rounds == telemetry_overhead.MIN_ROUNDS == 6
