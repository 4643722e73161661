"""`triaxis footprint`: the tables a person reads, the numbers a script reads."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.command_line import ROOT
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.launch.cli import main
from triaxis.launch.footprint.ladder import ladder
from triaxis.models.predict.rank_memory import KINDS
from triaxis.models.predict.step_time.cluster import cluster_of
from triaxis.models.predict.step_time.estimate import Estimator

pytestmark = pytest.mark.distributed

COMMAND = ["footprint", "--config", str(ROOT / "configs" / "gpt_tiny.yaml")]


def test_one_rank_of_eight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    words = ["--layout", "tp=2,pp=2,vpp=2,dp=2,sp=true", "--rank", "6", "precision.dtype=bf16", "--output", str(path)]
    assert main([*COMMAND, *words]) == 0
    out = capsys.readouterr().out
    assert (
        "rank 6 (pp 1, dp 1, tp 0), stages 1, 3, of tp=2 pp=2 vpp=2 dp=2; 4 microbatches of 4: all of them run" in out
    )
    assert "…" not in out, "in a pipe nothing is cut"
    lines = out.splitlines()
    assert lines[0].startswith(f"{COMMAND[2]}: rank 6 holds ") and "at the peak of a step" in lines[0]
    assert lines[2] == "memory" and "iB" not in out
    assert "blocks.N.attention_norm" in out and "dp, gradients" in out and "reduce-scatter" in out
    assert "the formula for a layer, bytes per token" in out and "(+0.00 %)" in out
    (tree,) = json.loads(path.read_text())["ranks"]
    # Master and moments are half of what they would be without a second owner; main grads are fp32.
    state = tree["state_bytes"]
    assert state["gradients"] == 2 * state["parameters"]
    assert state["optimizer"] == 3 * state["gradients"] // 2
    assert tree["peak_bytes"].keys() <= tree["most_bytes"].keys()
    largest = tree["largest"]
    assert (
        f"makes: {largest['shape']} {largest['dtype']}, " in out
        and f"by {largest['operator']} in {largest['site']}" in out
    )
    assert {one["axis"] for one in tree["traffic"]} == {"dp", "ends", "pp_backward", "pp_forward", "tp", "world"}


def test_microbatches_that_were_added_up_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--layout", "tp=2,pp=2,dp=2", "--rank", "0", "--rank", "7", "train.global_batch_size=80"]
    assert main([*COMMAND, *words]) == 0
    out = capsys.readouterr().out
    assert out.count("10 microbatches of 4: 4 run, 6 added up from those like them") == 2
    assert "rank 0 (" in out and "rank 7 (" in out


def test_all_ranks_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "met.json"
    assert main([*COMMAND, "--layout", "tp=1,pp=2,dp=2", "--replay", "--output", str(path)]) == 0
    assert "all 4 ranks, 4 microbatches: every call met its other ends" in capsys.readouterr().out
    met = json.loads(path.read_text())["replay"]
    assert met["ranks"] == [0, 1, 2, 3]
    # Two pipelines of one boundary, four microbatches, each way.
    assert met["messages"] == {"pp_forward": 8, "pp_backward": 8}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "tp=2,dp=4", "--rank", "8"], "8 ranks, counted from 0"),
        (["parallel.dp=null"], "parallel.dp is open"),
        (["--layout", "tp=0"], "parallel.tp"),
        (["--replay", "--rank", "1"], "Leave one out"),
        (["--ladder", "--replay"], "the ladder predicts, and --replay would do nothing"),
        (["--ladder", "--gpu-kind", "abacus"], "abacus is no GPU with known links and rates"),
        (["--gpu-kind", "A100"], "or add --ladder"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main([*COMMAND, *words]) == 2
    assert said in capsys.readouterr().err


def ladder_of(words: list[str], path: Path) -> dict[str, Any]:
    assert main(["footprint", *words, "--ladder", "--output", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("layout", ["parallel.tp=1", "parallel.tp=2", "parallel.pp=2"])
def test_the_ladder_shows_what_config_check_predicts(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["llama3_8b", "--gpus", "16", layout]
    found = ladder_of(run, tmp_path / "ladder.json")
    table = capsys.readouterr().out
    rows = found["ladder"]
    assert [row["stage"] for row in rows] == ["1", "2", "2 + offload", "3", "3 + offload"]
    assert found["device"] == "H100-SXM-80GB" and "host/node" in table
    estimator = Estimator(cluster_of("16xH100"))
    for row in rows:
        overrides = [f"{key}={value}" for key, value in row["changes"].items()]
        assert main(["config", "check", *run, *overrides]) == 0
        held = row["memory_bytes"]
        assert (row["host_bytes_per_node"] > 0) == row["stage"].endswith("offload")
        assert f"memory     {gigabytes(held['total'])} predicted on the fullest rank" in capsys.readouterr().out
        assert f" {gigabytes(held['total'])} " in table
        assert held["total"] == sum(held[kind] for kind in KINDS)
        assert row["fits"] == (held["total"] <= found["device_bytes"]) and row["problem"] is None
        config = load_config("llama3_8b", [layout, *overrides, "runtime.ranks_per_node=8"], {}, world_size=16)
        assert row["seconds"] == estimator.simulated(config, parallel_sizes(config, 16)).seconds
    for offloaded in (rows[::2], [rows[0], rows[1], rows[3]]):
        totals, seconds = ([row["memory_bytes"]["total"] for row in offloaded], [row["seconds"] for row in offloaded])
        assert totals == sorted(totals, reverse=True) and seconds == sorted(seconds)


def test_a_refused_rung_says_why_and_unknown_seconds_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["llama3_8b", "--gpus", "8", "precision.fp8={recipe: tensorwise}"]
    first, second, _, third, _ = ladder_of(words, tmp_path / "ladder.json")["ladder"]
    assert third["memory_bytes"] is third["fits"] is None and "at most 2 with precision.fp8" in third["problem"]
    assert first["memory_bytes"]["total"] > second["memory_bytes"]["total"] and first["seconds"] is None
    printed = capsys.readouterr().out
    assert "refused: parallel.zero = 3" in printed and printed.count("no rates of FP8 GEMMs are known") == 1


def test_rungs_are_data() -> None:
    """Rows of one's own: several fields at once, and too many stages for 32 layers."""
    config = load_config("llama3_8b", ["parallel.tp=1"], {}, world_size=8)
    config = with_value(config, "parallel.dp", 8)
    rungs = {"3 + split": (("parallel.zero", 3), ("precision.masters", "split")), "0": (("parallel.pp", 64),)}
    found, refused = ladder(config, "A100", rungs=rungs).rungs
    plain = ladder(config, "A100").rungs[-2]
    assert found.memory is not None and plain.memory is not None
    assert found.memory.optimizer < plain.memory.optimizer and found.memory.gradients == plain.memory.gradients
    assert refused.memory is None and refused.problem
