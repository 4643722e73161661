"""The chart of the numbers that FP8 rounds to zero."""

import json
from pathlib import Path

from triaxis.launch.report.parts import _worst_underflow, fp8_losses
from triaxis.launch.report.record import read_run

LOST = {
    "layers.0.mlp.up": {"input": {"underflow": 0.25, "overflow": 0.0}, "gradient": {"underflow": 0.5, "overflow": 0.0}},
    "layers.1.mlp.up": {"input": {"underflow": 0.75, "overflow": 0.0}},
}


def test_a_line_for_each_operand_of_the_worst_layer(tmp_path: Path) -> None:
    steps = [{"step": step, "attempt": 0, "loss": 2.0} for step in range(1, 5)]
    for step in (1, 3):
        steps[step]["fp8"] = LOST
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    drawn = fp8_losses(read_run(tmp_path))
    assert "Share that FP8 rounds to zero, worst layer" in drawn
    assert all(operand in drawn for operand in ("input", "gradient", "weight"))
    assert _worst_underflow(LOST, "input") == 0.75 and _worst_underflow(LOST, "gradient") == 0.5
    assert _worst_underflow(LOST, "weight") != _worst_underflow(LOST, "weight"), "nan: no layer has it"


def test_a_run_without_fp8_has_no_chart(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "attempt": 0, "loss": 2.0}) + "\n")
    assert fp8_losses(read_run(tmp_path)) == ""
