"""The charts of norms by groups of parameters."""

import json
from pathlib import Path

from triaxis.launch.report.parts import group_norms
from triaxis.launch.report.record import read_run


def test_a_line_for_each_group_on_measured_steps(tmp_path: Path) -> None:
    steps = [{"step": step, "attempt": 0, "loss": 2.0} for step in range(1, 5)]
    for step in (1, 3):
        steps[step]["norms"] = {
            "embedding.*": {"grad": 1.0, "weight": 2.0, "update": 0.5 * step},
            "others": {"grad": 0.5, "weight": 0.0, "update": 0.0},
        }
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    drawn = group_norms(read_run(tmp_path))
    for title in ("Gradient norm by group", "Norm of weights by group", "Update over weights by group"):
        assert title in drawn
    assert drawn.count("embedding.*") >= 3


def test_a_run_that_has_measured_none_has_no_chart(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "attempt": 0, "loss": 2.0}) + "\n")
    assert group_norms(read_run(tmp_path)) == ""
