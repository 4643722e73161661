"""`triaxis footprint`: the tables a person reads, the numbers a script reads."""

import json
from pathlib import Path

import pytest

from launch.cli import main
from tests.launch.command_line import ROOT

COMMAND = ["footprint", "--config", str(ROOT / "configs" / "gpt_tiny.yaml")]


def test_one_rank_of_eight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    words = ["--layout", "tp=2,pp=2,vpp=2,dp=2,sp=true", "--rank", "6", "precision.dtype=bf16", "--json", str(path)]
    assert main([*COMMAND, *words]) == 0
    out = capsys.readouterr().out
    assert "rank 6 (pp 1, dp 1, tp 0), stages 1, 3, of tp=2 pp=2 vpp=2 dp=2; 4 microbatches of 4" in out
    assert "blocks.N.attention_norm" in out and "dp, gradients" in out and "reduce-scatter" in out
    tree = json.loads(path.read_text())
    # Master and moments are half of what they would be without a second owner; main grads are fp32.
    state = tree["state_bytes"]
    assert state["gradients"] == 2 * state["parameters"]
    assert state["optimizer"] == 3 * state["gradients"] // 2
    assert tree["peak_bytes"].keys() <= tree["most_bytes"].keys()
    assert {one["axis"] for one in tree["traffic"]} == {"dp", "ends", "pp_backward", "pp_forward", "tp", "world"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "tp=2,dp=4", "--rank", "8"], "8 ranks, counted from 0"),
        (["parallel.dp=null"], "parallel.dp is open"),
        (["--layout", "tp=0"], "parallel.tp"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main([*COMMAND, *words]) == 2
    assert said in capsys.readouterr().err
