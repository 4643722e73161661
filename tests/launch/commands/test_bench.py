"""`triaxis bench`: layouts are trained for a few steps and ranked, what cannot be trained is listed with its reason."""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.command_line import ROOT, TRIAXIS, run
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.errors import ConfigError
from triaxis.engine.telemetry.record.flops import CONVENTION, model_flops_per_token
from triaxis.launch.cli import command_module, main
from triaxis.launch.start import launcher
from triaxis.launch.start.launcher import Request
from triaxis.launch.start.world import Gpus
from triaxis.launch.tuning import layouts as try_layouts
from triaxis.launch.tuning.layer_costs import LayerCosts, Pass
from triaxis.launch.tuning.layouts import (
    Failed,
    FullestRank,
    LayerProfile,
    LayoutResult,
    rank_outcomes,
    reason_of,
    try_layout,
    write_config,
)
from triaxis.launch.tuning.report import MachineRecord, Tried, cpu_name, git_commit, to_json, to_text
from triaxis.models.predict.rank_memory import predicted_memory

TINY = ROOT / "configs" / "gpt_tiny.yaml"
SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.seq_length=32",
    "train.global_batch_size=4",
    "train.micro_batch_size=1",
)
MACHINE = MachineRecord(
    "NVIDIA H100 80GB HBM3", 8, True, "550.54.15", {"torch": "2.13.0", "NCCL": "2.27.3"}, "0123456789ab"
)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_layouts_are_trained_and_ranked(tmp_path: Path) -> None:
    words = ("bench", str(TINY), "--steps", "3", "--layouts", "tp=2;pp=2;tp=3", "--profile", "--output", "tried.json")
    ended = run(tmp_path, *TRIAXIS, *words, *SMALL, "telemetry.peak_tflops=0.001", RUN_NAME="mine")
    assert ended.exit_code == 0, ended.err
    # The block alone goes to stdout: what the runs say does not.
    assert ended.out.startswith("command   triaxis bench ") and "  output  " not in ended.out
    assert [path.name for path in tmp_path.iterdir()] == ["tried.json"]

    tried = json.loads((tmp_path / "tried.json").read_text())
    names = {"tp=2 pp=1 vpp=1 dp=1", "tp=1 pp=2 vpp=1 dp=1"}
    assert {one["layout"] for one in tried["layouts"]} == names
    assert all(name in ended.out for name in names)
    assert [one["layout"] for one in tried["failed"]] == ["tp=3"] and tried["failed"][0]["exit_code"] == 2
    assert "  tp=3: model.num_attention_heads = 4: must be a multiple" in ended.out
    speeds = [one["tokens_per_second_per_rank"] for one in tried["layouts"]]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > 0
    for one in tried["layouts"]:
        config = load_config(TINY, [*SMALL, "parallel.vpp=1", f"parallel.pp={one['config']['parallel']['pp']}"])
        # The traced step is a fourth.
        assert one["num_ranks"] == 2 and (one["first_step"], one["last_step"]) == (2, 3)
        costs = one["layer"]["measured"]
        assert costs["backward"]["calls"] > costs["forward"]["calls"] > 20 and one["layer"]["predicted"] is None
        assert sum(one["time"].values()) == pytest.approx(1)
        flops = model_flops_per_token(config.model)
        assert one["model_tflops"] == pytest.approx(flops * one["tokens_per_second_per_rank"] / 1e12, rel=1e-6)
        assert one["mfu"] == pytest.approx(one["model_tflops"] / 0.001, rel=1e-6)
        assert 0 < one["memory"]["predicted"] < one["memory"]["measured"]
    said = ended.out.replace("\n          ", " ")
    assert f"FLOPs per token = {CONVENTION}\npeak      0.001 TFLOP/s per rank (telemetry.peak_tflops)\n" in said


def measured(tokens_per_second: float, num_ranks: int, dtype: str = "bf16") -> LayoutResult:
    return LayoutResult(
        config=load_config(TINY, [f"precision.dtype={dtype}"], {}),
        layout=f"tp={num_ranks} pp=1 vpp=1 dp=1",
        num_ranks=num_ranks,
        device="NVIDIA H100 80GB HBM3, nccl",
        is_gpu=True,
        first_step=6,
        last_step=20,
        step_seconds=0.25,
        tokens_per_second=tokens_per_second,
        model_tflops=400.0,
        mfu=400.0 / 989.4,
        memory=FullestRank(rank=1, measured=3 * 2**30, predicted=2 * 2**30),
        time={"compute": 0.75, "exposed_tp": 0.2, "bubble": 0.0, "other": 0.05},
        loss=5.5,
    )


FAILED = Failed("tp=16", "parallel.tp = 16: too many.\nparallel.dp = 3: too odd.", 2)


def tried(*outcomes: LayoutResult | Failed) -> Tried:
    return Tried(["triaxis", "bench", "x.yaml", "--layouts", "tp=2;tp=4"], "x", 20, MACHINE, outcomes)


def test_layouts_are_ranked_by_what_one_gpu_does() -> None:
    slow, fast = measured(3000.0, 4), measured(2000.0, 2)
    assert rank_outcomes([slow, FAILED, fast]) == ([fast, slow], [FAILED])


def test_the_block_says_everything_that_a_number_needs() -> None:
    block = to_text(tried(measured(3000.0, 4), FAILED, measured(2000.0, 2)))
    lines = block.splitlines()
    assert max(map(len, lines)) <= 100
    # What was asked, on what, and the answer are in the first ten lines.
    assert [line.split()[0] for line in lines if line[:1].strip()][:4] == ["command", "machine", "model", "1."]
    assert next(index for index, line in enumerate(lines) if line.startswith("1.")) < 9
    text = block.replace("\n          ", " ")
    assert text.splitlines()[0] == "command   triaxis bench x.yaml --layouts 'tp=2;tp=4'"
    for part in (
        "8 x NVIDIA H100 80GB HBM3; driver 550.54.15; torch 2.13.0, NCCL 2.27.3; commit 0123456789ab",
        "x: 886,016 parameters, bf16, sequence 128; random tokens, 32 samples per step, 4 per microbatch",
        "the median of steps 6 to 20",
        f"tokens/s per GPU x FLOPs per token / peak; FLOPs per token = {CONVENTION}\n",
        "peak      989.4 TFLOP/s per GPU (NVIDIA H100 architecture white paper, SXM5)\n",
        "tokens/s/GPU",
        "1.  tp=2 pp=1 vpp=1 dp=1      2         1,000     2,000",
        "2.  tp=4 pp=1 vpp=1 dp=1      4           750     3,000",
        "40.4%  3.22 GB    2.15 GB",
        "1.  compute 75.0%  tp 20.0%  other 5.0%\n",
        "not trained:\n  tp=16: parallel.tp = 16: too many.\n    parallel.dp = 3: too odd.\n",
    ):
        assert part in text, text
    assert "bubble" not in text


def test_the_costs_of_a_layer_have_their_prediction_below() -> None:
    costs: dict[Pass, LayerCosts] = {"forward": LayerCosts(10, 240, 1250.4), "backward": LayerCosts(19, 510, 2500)}
    traced = replace(measured(3000.0, 4), layer=LayerProfile(costs, LayerCosts(27, 810, 3600)))
    replayed = replace(measured(2000.0, 2), layer=LayerProfile(None, None))
    assert """
a layer and a microbatch, traced on rank 0:
                                             calls  host us  device us
1.  no layer is called: graphs are replayed
2.  forward                                     10      240      1,250
    backward                                    19      510      2,500
    both, predicted                             27      810      3,600
""" in to_text(tried(traced, replayed))
    assert json.loads(json.dumps(to_json(tried(replayed))))["layouts"][0]["layer"] == {
        "measured": None,
        "predicted": None,
    }


def test_without_a_peak_there_is_no_mfu() -> None:
    unknown = replace(measured(2000.0, 2, dtype="fp32"), mfu=None)
    text = to_text(tried(unknown)).replace("\n          ", " ")
    assert "so there is no MFU" in text and "    -  3.22 GB" in text
    assert to_json(tried(unknown))["peak"] is None


def test_where_nothing_was_trained_the_reasons_are_left() -> None:
    text = to_text(tried(FAILED))
    assert "not trained:\n  tp=16:" in text and "speeds" not in text
    content = json.loads(json.dumps(to_json(tried(FAILED))))
    assert content["layouts"] == [] and content["failed"][0]["reason"] == FAILED.reason


def test_the_short_run_needs_and_leaves_nothing(tmp_path: Path) -> None:
    given = [
        "checkpoint.load=runs/other",
        "telemetry.wandb={project: p}",
        "telemetry.tensorboard=true",
        "train.steps=null",
        "train.tokens=20M",
        "optimizer.warmup_steps=50",
        "optimizer.decay_steps=500",
        "parallel.dp=null",
    ]
    config = load_config(write_config(TINY, given, 4, tmp_path, "layout_1", {"TP": "4"}))
    assert (config.train.steps, config.train.tokens, config.eval.interval) == (4, None, None)
    assert (config.optimizer.warmup_steps, config.optimizer.decay_steps, config.optimizer.lr) == (0, None, 3e-3)
    assert config.data.synthetic and config.data.train == []
    assert (config.checkpoint.interval, config.checkpoint.load) == ("never", None)
    assert (config.telemetry.wandb, config.telemetry.tensorboard, config.telemetry.sample_tokens) == (None, False, 0)
    assert config.runtime.runs_dir == str(tmp_path) and config.parallel.tp == 4


def broken_launch(exit_code: int):
    def launch(request: Request, variables: Mapping[str, str]) -> int:
        print("rank 1 ended with exit code 2, so the job was stopped.")
        print("  | error: the GPU is out of memory in 3F1: 81 GB are needed", file=sys.stderr)
        print("error: a rank lost its peer")
        return exit_code

    return launch


def test_a_layout_that_breaks_is_listed_with_its_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(try_layouts, "launch", broken_launch(2))
    path = write_config(TINY, ["parallel.dp=null"], 3, tmp_path, "layout_1", {})
    outcome = try_layout(path, "tp=2", tmp_path / "log")
    assert isinstance(outcome, Failed)
    assert (outcome.layout, outcome.exit_code) == ("tp=2", 2)
    assert outcome.reason == "the GPU is out of memory in 3F1: 81 GB are needed"
    assert outcome.output.endswith("error: a rank lost its peer")
    assert capfd.readouterr() == ("", "")
    # Afterwards this process writes to its terminal again, below Python's streams too.
    os.write(1, b"back")
    os.write(2, b"there")
    assert capfd.readouterr() == ("back", "there")


def test_after_a_layout_that_breaks_the_next_is_tried(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(try_layouts, "launch", broken_launch(1))
    assert main(["bench", str(TINY), "--layouts", "tp=1;tp=2"]) == 1
    out, err = capfd.readouterr()
    assert "  tp=1: the GPU is out of memory" in out and "  tp=2: the GPU is out of memory" in out
    assert "layout 2 of 2: tp=2, 20 steps" in err and "  | error: a rank lost its peer" in err


def test_the_card_is_named_where_nothing_fits_on_it(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    command = command_module("bench")
    monkeypatch.setattr(try_layouts, "launch", broken_launch(2))
    monkeypatch.setattr(command, "find_gpus", lambda variables: Gpus(8))
    monkeypatch.setattr(command, "look_at_machine", lambda *, is_gpu: MACHINE if is_gpu else None)
    assert main(["bench", str(TINY), "--layouts", "tp=1", "runtime.device=cpu"]) == 1
    assert "machine   8 x NVIDIA H100 80GB HBM3; driver 550.54.15" in capfd.readouterr().out


def test_one_card_gets_a_layout_that_fits_it(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """The default layout of gpt_tiny has eight ranks. The command that is printed is tried as it stands."""
    command = command_module("bench")
    monkeypatch.setattr(launcher, "find_gpus", lambda variables: Gpus(1))
    monkeypatch.setattr(launcher, "read_devices", lambda variables: None)
    monkeypatch.setattr(command, "find_gpus", lambda variables: Gpus(1))
    monkeypatch.setattr(command, "look_at_machine", lambda *, is_gpu: MACHINE)
    assert main(["bench", str(TINY), "--steps", "4", "train.seed=3"]) == 1
    lines = capfd.readouterr().out.splitlines()
    place = lines.index("not trained:")
    assert "needs 8 GPUs per node and this node shows 1. A layout that fits is tried by" in lines[place + 1]
    words = shlex.split(lines[place + 2])
    assert place + 2 < 10 and words == [
        "triaxis",
        "bench",
        str(TINY),
        "--steps",
        "4",
        "--layouts",
        "dp=1",
        "train.seed=3",
    ]
    assert main([*words[1:], "--dry-run"]) == 0
    assert "tp=1 pp=1 vpp=1 dp=1" in capfd.readouterr().out


def test_a_person_who_stops_it_is_obeyed(monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(try_layouts, "launch", broken_launch(130))
    assert main(["bench", str(TINY), "--layouts", "tp=1;tp=2"]) == 130
    out, err = capfd.readouterr()
    assert out == "" and "layout 2 of 2" not in err and "no further layout is tried" in err


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("x\nerror: first\n | error: second\n", "first"),
        ("  | torch.OutOfMemoryError: CUDA out of memory. Tried\n", "CUDA out of memory. Tried"),
        ("step 1\nKilled\n\n", "exit code 137: Killed"),
        ("", "exit code 137"),
    ],
)
def test_the_reason_is_the_first_error(output: str, reason: str) -> None:
    assert reason_of(output, 137) == reason


def test_a_dry_run_shows_the_launch_of_each_layout(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["bench", str(TINY), "--layouts", "tp=1;tp=2,pp=2", "--gpus", "4", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("--nproc-per-node=4") == 2 and "tp=1 pp=1 vpp=1 dp=4" in out and "tp=2 pp=2 vpp=1 dp=1" in out
    assert main(["bench", str(TINY), "--layouts", "tp=3", "--dry-run"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "2"], "--steps 2: at least 3"),
        (["--steps", str(2**40 + 1), "--dry-run"], "--steps 1099511627777: must be at most 1,099,511,627,776"),
        (["--steps", "1" + "0" * 400, "--dry-run"], "--steps an integer of 1,329 bits"),
        (["--layouts", "tq=2"], "layout tq=2: 'tq=2' is not one of tp=.."),
        (["--layouts", " ; "], "--layouts names none"),
        (["--gpus", "0"], "must be at least 1"),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(TINY), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["RANK", "NNODES", "HOSTFILE"])
def test_other_launchers_are_refused(variable: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv(variable, "2")
    assert main(["bench", str(TINY), "--dry-run"]) == 2
    assert "starts its ranks itself, on one machine" in capsys.readouterr().err


def test_the_prediction_is_of_the_rank_that_held_most() -> None:
    config = load_config(
        TINY, ["parallel.vpp=1", "parallel.dp=1", "parallel.tp=1", "parallel.sequence_parallel=false"], {}
    )
    sizes = parallel_sizes(config)
    assert try_layouts._memory(config, sizes, [5, 9]) == FullestRank(1, 9, predicted_memory(config, sizes, 1).tensors)
    assert predicted_memory(config, sizes, 0).tensors != predicted_memory(config, sizes, 1).tensors


def test_the_machine_is_named(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7B13\nprocessor\t: 1\nmodel name\t: AMD EPYC 7B13\n")
    assert cpu_name(info) == "AMD EPYC 7B13"
    assert cpu_name(tmp_path / "none") != ""
    assert git_commit(tmp_path) == "no git checkout"


def test_a_layout_that_no_ranks_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("NPROC_PER_NODE", "3")
    path = write_config(TINY, ["parallel.dp=null"], 3, tmp_path, "layout_1", {})
    outcome = try_layout(path, "tp=2,pp=2", tmp_path / "log")
    assert isinstance(outcome, Failed) and outcome.exit_code == ConfigError.exit_code
    assert "3" in outcome.reason and "has 1 problem" not in outcome.reason
