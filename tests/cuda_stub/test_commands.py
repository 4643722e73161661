"""What people type, on cards: train, stop, resume in another layout, evaluate, generate, doctor, bench, footprint; two bad ends."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.cuda_stub.test_layouts import layout
from tests.launch.command_line import ROOT, TRIAXIS, ended, ranks_of, records, run, started, wait_for_steps
from triaxis.engine.errors import ExitCode
from triaxis.engine.resilience.hang.watch import hang_report

LONGEST = 400.0
"""Seconds for a command: each rank compiles its functions, on a machine that may be busy."""

IN_FP32 = 2e-6
"""Largest relative difference of losses between layouts and devices, some steps after the start."""

SMALL = (
    str(ROOT / "configs" / "gpt_tiny.yaml"),
    *("data.synthetic=true", "eval.interval=null", "telemetry.sample_tokens=0", "telemetry.log_interval=1"),
    *("model.num_layers=2", "model.seq_length=64", "train.global_batch_size=4", "train.micro_batch_size=1"),
    *("model.init_std=0.1", "optimizer.warmup_steps=1", "optimizer.decay_steps=100"),
)

EAGER = ("kernels.elementwise=eager", "kernels.optimizer=torch")
"""Kernels that need no compiler."""

WORKSPACES = 2 * 32 * 2**20
"""Bytes that torch gives to cuBLAS on a Hopper, in forward and in backward; predictions leave them out."""


def cards(number: int) -> dict[str, str]:
    """Return variables of a machine with so many cards."""
    return {"CARD_DEVICES": str(number), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(number)))}


def said(folder: Path, *words: str, on: int = 2, **variables: str) -> str:
    """Run a command that ends well. Returns what it printed."""
    done = run(folder, *TRIAXIS, *words, within_seconds=LONGEST, **cards(on) | variables)
    assert done.exit_code == 0, done.out + done.err
    return done.out


def losses(folder: Path, name: str) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(folder / "runs" / name / "metrics.jsonl")}


@pytest.mark.slow
def test_the_doctor_looks_at_two_cards(tmp_path: Path) -> None:
    out = said(tmp_path, "doctor", *SMALL, *layout(tp=2))
    assert re.search(r"0-1 +NVIDIA H100 80GB HBM3", out) and "nothing is out of line" in out
    assert "device cuda, CUDA 13.0, NCCL 2.29.7" in out and "GPU memory 79 GiB" in out
    assert re.search(r"tp +all-gather +16.38 kB +1 ", out), "it has measured the layout's calls"


def test_a_rank_that_stands_still_is_named_and_nccl_tells_its_call(tmp_path: Path) -> None:
    words = ("train", *SMALL, *EAGER, *layout(tp=2), "train.steps=100000", "checkpoint.interval=never")
    with started(tmp_path, *TRIAXIS, *words, "runtime.hang_seconds=4", **cards(2)) as launcher:
        wait_for_steps(launcher, tmp_path / "runs" / "gpt_tiny" / "metrics.jsonl", 3, LONGEST)
        ranks_of(launcher)[1].send_signal(signal.SIGSTOP)
        done = ended(launcher, within_seconds=60.0)
    assert done.exit_code == ExitCode.HUNG
    folder = tmp_path / "runs" / "gpt_tiny" / "hangs" / "attempt_00"
    report = hang_report(folder)
    assert report is not None and report["culprits"] == [1] and report["reporter"] == 0
    assert re.search(r"rank 1 \(pp 0, dp 0, tp 1; \S+, pid \d+, GPU 1\) does not answer", done.out + done.err)
    record = json.loads((folder / "rank_00000.nccl.json").read_text())
    waits = next(call for call in record["entries"] if call["state"] != "completed")
    group, name = waits["process_group"]
    # The world has the ranks of tp, and so its group.
    assert (record["pg_config"][group]["ranks"], name) == ("[0, 1]", "world")
    assert re.fullmatch(r"nccl:(_all_gather_base|_reduce_scatter_base|all_reduce)", waits["profiling_name"])


def test_a_card_that_is_too_small_is_told_in_numbers(tmp_path: Path) -> None:
    # Scores of a layer are 4 samples x 4 heads x 2048 x 2048 numbers, 256 MiB, where attention makes them.
    wide = (
        "model.seq_length=2048",
        "train.global_batch_size=4",
        "train.micro_batch_size=4",
        "kernels.attention=explicit",
    )
    words = ("train", *SMALL[:6], *layout(), *EAGER, *wide, "train.steps=20", "checkpoint.interval=never")
    done = run(tmp_path, *TRIAXIS, *words, within_seconds=LONGEST, **cards(1), CARD_GIB="0.5")
    told = done.out[done.out.find("is out of memory") :]
    assert done.exit_code == ExitCode.MISTAKE
    assert "at 0F0, forward of microbatch 0 on chunk 0: an allocation of 256.00 MiB of GPU memory failed" in told
    rows = {line.split()[0]: line.split()[1:] for line in told.splitlines() if line.startswith("  ")}
    assert all(rows[kind][:2] == rows[kind][2:] for kind in ("parameters", "gradients", "optimizer")), told
    found = re.search(r"held so far: ([\d.]+) MB. The GPU has 536.87 MB, of which ([\d.]+) MB are free", told)
    assert found is not None, told
    held, free = map(float, found.groups())
    assert free < 2**28 / 1e6 and 0.9 * 536.87 < held + free <= 536.87
    assert "kernels.attention=sdpa: " in told and "train.micro_batch_size=2: " in told


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs/demo: stopped by a signal in tp 2, resumed in dp 2 and again in pp 2."""
    folder = tmp_path_factory.mktemp("commands")
    words = ("train", *SMALL, *layout(tp=2), "train.steps=100000", "runtime.name=demo")
    with started(folder, *TRIAXIS, *words, **cards(2)) as launcher:
        wait_for_steps(launcher, folder / "runs" / "demo" / "metrics.jsonl", 2, LONGEST)
        launcher.send_signal(signal.SIGTERM)
        done = ended(launcher, LONGEST)
    assert done.exit_code == ExitCode.REQUEUE, done.out + done.err
    for another, more in (layout(dp=2), "tp 2 -> 1"), (layout(pp=2), "pp 1 -> 2"):
        stopped = max(losses(folder, "demo"))
        out = said(folder, "train", *SMALL, "runtime.name=demo", f"train.steps={stopped + 2}", *another)
        assert f"resuming after step {stopped}" in out and more in out
    return folder


@pytest.mark.slow
def test_a_run_goes_on_in_other_layouts_as_one_that_never_stopped(trained: Path) -> None:
    found = losses(trained, "demo")
    said(trained, "train", *SMALL, *layout(), "runtime.name=alone", f"train.steps={max(found)}", "runtime.device=cpu")
    assert found == pytest.approx(losses(trained, "alone"), rel=IN_FP32) and len(found) >= 6


@pytest.mark.slow
def test_what_was_trained_is_evaluated_and_generates_as_on_the_cpu(trained: Path) -> None:
    (trained / "text").write_text("the text of a file, longer than a window of the model: " * 4)
    for words, key in (
        (("evaluate", "runs/demo", "--text", "text", "--tp", "2", "--json"), "loss"),
        (("generate", "runs/demo", "--prompt", "Once", "--max-new-tokens", "8", "--json"), "tokens"),
    ):
        found, on_cpu = (json.loads(said(trained, *words, **more)) for more in ({}, {"CUDA_VISIBLE_DEVICES": ""}))
        assert found[key] == pytest.approx(on_cpu[key], rel=IN_FP32)


@pytest.mark.slow
def test_layouts_are_compared_and_a_rank_holds_what_was_counted(tmp_path: Path) -> None:
    tried = said(tmp_path, "bench", *SMALL, "--steps", "4", "--layouts", "tp=2;dp=2", "--json")
    assert len(json.loads(tried)["layouts"]) == 2, tried
    # A compiler that times its kernels holds memory for that.
    words = ("footprint", *SMALL, *EAGER, *layout(tp=2), "--real", "--json")
    (found,) = json.loads(said(tmp_path, *words, on=1))["ranks"]
    held, counted = found["real"]["peak_allocated_bytes"] - WORKSPACES, sum(found["peak_bytes"].values())
    assert counted <= held <= 1.01 * counted and held + WORKSPACES <= found["real"]["peak_reserved_bytes"]


@pytest.mark.slow
def test_the_first_run_on_cards_ends_in_a_block_to_paste(tmp_path: Path) -> None:
    """All pieces but those that are tests or take as long: the tests of this tier, and all pairs of features."""
    names = ("doctor", "layout", "speed-tiny", "peers-tiny", "fp8-tiny")
    script = ("bash", str(ROOT / "benchmarks" / "first_card.sh"), "--folder", str(tmp_path), "--shapes", "tiny")
    done = run(tmp_path, *script, "--only", *names, within_seconds=4 * LONGEST, **cards(2))
    assert done.exit_code == 0, done.out + done.err
    found = {one["piece"]: one["status"] for one in records(tmp_path / "records.jsonl")}
    assert found == dict.fromkeys(names, "passed")
    block = done.out[done.out.index("```text") :]
    assert block.count("```") == 2 and re.search(r"card +NVIDIA H100 80GB HBM3, GPU memory 79 GiB", block)
    assert re.search(r"layout +passed: \S", block)
    for name in ("ours", "ours_graphs", "ours_fp8", "plain_compile", "transformers", "megatron"):
        assert re.search(rf"tiny {name} +[\d,]+ tokens/s, micro batch 2, MFU ", block), block
