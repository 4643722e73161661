"""The GPU benchmark: its formulas, classes of kernels, tables, and that rows are appended, kept and explained (never timed)."""

import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_contenders import ceiling
from benchmarks.gpu_contenders.contenders import CONTENDERS, OURS
from benchmarks.gpu_contenders.records import (
    DID_NOT_FIT,
    NO_DEVICE,
    Job,
    Run,
    append,
    failed,
    measured,
    newest,
    rates,
    read,
)
from benchmarks.gpu_contenders.shapes import OPTIMISATIONS, SHAPES, base_words, overridden, resolve, write_config
from benchmarks.gpu_contenders.tables import one_line, tables
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config

TOY = Job(
    shape="tiny",
    contender=OURS,
    device="cpu",
    dtype="fp32",
    micro_batch_sizes=(2,),
    micro_batch_size=2,
    steps=3,
    warm_up=1,
    ceiling_size=64,
    ceiling_seconds=0.0,
)
HERE: dict[str, Any] = {"machine": {"cpu": "a CPU"}, "versions": {"torch": "2.x"}}


def a_run(*step_seconds: float, recompute: RecomputeConfig | None = None) -> Run:
    return Run(step_seconds, 5.0, 4.0, None, recompute or RecomputeConfig(), {})


# Formulas.


@pytest.mark.slow
def test_rates_of_the_tiny_shape_counted_by_hand() -> None:
    # 2 layers of h = 64: 4 h^2 for attention, 8 h^2 for the MLP; a head of 300 rows; 2 FLOPs forward and 4 backward per weight.
    weights = 2 * 12 * 64**2 + 300 * 64
    # Scores and weighted sum: 2 GEMMs of s x h, 2 FLOPs each and thrice that with the backward; causal: half the keys.
    attention = 2 * 3 * 2 * 2 * 32 * 64
    # 3 steps of 128 tokens in 2 seconds.
    numbers = rates(TOY, a_run(0.5, 0.5, 1.0), ceiling_tflops=0.001)
    assert numbers["tokens_per_second"] == pytest.approx(192)
    assert numbers["model_tflops_non_causal"] == pytest.approx(192 * (6 * weights + attention) / 1e12)
    causal = 192 * (6 * weights + attention / 2) / 1e12
    assert numbers["model_tflops_causal"] == pytest.approx(causal)
    assert numbers["r"] == pytest.approx(causal / 0.001)
    # 300 rows are padded to 384, and recomputing attention makes its forward (a third of its FLOPs) once more.
    padding = 6 * 84 * 64
    assert numbers["hardware_tflops"] == pytest.approx(causal + 192 * padding / 1e12)
    again = rates(TOY, a_run(0.5, 0.5, 1.0, recompute=RecomputeConfig(granularity="selective")), 0.001)
    assert again["hardware_tflops"] == pytest.approx(causal + 192 * (padding + attention / 6) / 1e12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "causal", "non_causal"),
    [
        ("gpt-1.3b", 8.470, 9.074),
        ("gpt-2.7b", 16.88, 17.89),
        ("llama-8b-4k", 48.25, 51.47),
        ("llama-8b-8k", 51.47, 57.91),
    ],
)
def test_gflops_per_token_of_the_shapes(shape: str, causal: float, non_causal: float) -> None:
    """The numbers of the project's table of formulas, at one token per second."""
    job = replace(TOY, shape=shape)
    tokens = SHAPES[shape].samples_per_step * job.model.seq_length
    assert tokens >= 64_000
    numbers = rates(job, a_run(tokens), 1.0)
    assert numbers["model_tflops_causal"] * 1e3 == pytest.approx(causal, rel=5e-4)
    assert numbers["model_tflops_non_causal"] * 1e3 == pytest.approx(non_causal, rel=5e-4)


@pytest.mark.slow
def test_the_ceiling_counts_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which every block of ten products takes a second."""
    ticks = iter(range(1000))
    monkeypatch.setattr(ceiling.time, "perf_counter", lambda: float(next(ticks)))
    tflops = ceiling.matmul_ceiling(32, torch.float32, torch.device("cpu"), soak_seconds=3.0)
    assert tflops == pytest.approx(10 * 2 * 32**3 / 1e12)
    assert next(ticks) == 2 * (3 + ceiling.BLOCKS)


# Settings.


@pytest.mark.slow
@pytest.mark.parametrize("one", OPTIMISATIONS, ids=lambda one: one.name)
def test_an_optimisation_is_fields_of_the_configuration(one: Any, tmp_path: Path) -> None:
    known = set(Config.dotted_names())
    on, off = (dict(word.split("=") for word in words) for words in (one.on, one.off))
    assert on.keys() == off.keys() <= known
    assert all(on[field] != off[field] for field in on)
    shape = SHAPES["gpt-1.3b"]
    device, dtype = ("cuda", "bf16") if one.needs_cuda else ("cpu", "fp32")
    path = write_config(
        tmp_path, shape, corpus=tmp_path / "corpus", micro_batch_size=4, num_steps=9, dtype=dtype, device=device
    )
    with_it, without = (resolve(path, overridden(base_words(shape, device), words)) for words in (one.on, one.off))
    assert with_it != without


@pytest.mark.slow
def test_optimisations_have_names_of_their_own() -> None:
    assert len({one.name for one in OPTIMISATIONS}) == len(OPTIMISATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_configuration(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    assert shape.tokens_per_step % shape.model["seq_length"] == 0
    assert sorted(shape.micro_batch_sizes, reverse=True) == list(shape.micro_batch_sizes)
    for size in shape.micro_batch_sizes:
        path = write_config(
            tmp_path,
            shape,
            corpus=tmp_path / "corpus",
            micro_batch_size=size,
            num_steps=41,
            dtype="bf16",
            device="cuda",
        )
        config = resolve(path, base_words(shape, "cuda"))
        assert config.train.global_batch_size * config.model.seq_length == shape.tokens_per_step


@pytest.mark.slow
def test_a_later_setting_takes_the_place_of_an_earlier() -> None:
    assert overridden(["a.b=1", "c.d=2"], ["a.b=3"]) == ("a.b=3", "c.d=2")


@pytest.mark.slow
def test_options() -> None:
    options = gpu.parse(
        ["--micro-batches", "2,8,4", "ours=16", "--shapes", "gpt-1.3b", "--optimisations", "--set", "a.b=1"]
    )
    assert options.micro_batches == {"": [8, 4, 2], "ours": [16]}
    jobs = list(gpu.requests(options))
    assert [job.contender for job in jobs] == [OURS] * (1 + len(OPTIMISATIONS)) + [c for c in CONTENDERS if c != OURS]
    rounded = {job.contender: job.words for job in jobs if CONTENDERS[job.contender].is_ours and not job.variant}
    more = ("precision.fp8.recipe=tensorwise", "precision.fp8.backend=te")
    assert rounded["ours_fp8_te"] == (*base_words(SHAPES["gpt-1.3b"], "cuda"), *more, "a.b=1")
    assert [job.variant for job in jobs[1 : 1 + len(OPTIMISATIONS)]] == [one.name for one in OPTIMISATIONS]
    assert jobs[0].words == (*base_words(SHAPES["gpt-1.3b"], "cuda"), "a.b=1") and jobs[-1].words == ()
    assert jobs[0].micro_batch_sizes == (16,) and jobs[-1].micro_batch_sizes == (8, 4, 2)
    assert len({job.key for job in jobs}) == len(jobs)
    assert all(Job.from_json(job.to_json()) == job for job in jobs)
    on_cpu = gpu.parse(["--device", "cpu", "--shapes", "tiny"])
    assert "megatron_te" not in on_cpu.contenders and OURS in on_cpu.contenders and not on_cpu.optimisations
    assert "ours_fp8" in on_cpu.contenders
    assert "ours_fp8" not in gpu.parse(["--dtype", "fp32"]).contenders


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu", "--contenders", "megatron_te"], "megatron_te needs CUDA, and --device is cpu"),
        (["--dtype", "fp32", "--contenders", "plain_fp8"], "plain_fp8 is beside bf16, and --dtype is fp32"),
        (["--micro-batches", "theirs=4"], "no contender 'theirs'"),
        (["--micro-batches", "4,none"], "give sizes as"),
        (["--micro-batches", "5", "--shapes", "gpt-1.3b"], "has 32 samples, which are no whole microbatches of 5"),
    ],
)
def test_what_cannot_be_is_refused_by_name(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(words)
    assert said in capsys.readouterr().err


# Rows, and processes that leave none.


SCRIPT = """
import json, os, signal, sys, time
job, results, plan = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
what = plan[str(job["micro_batch_size"])]
print("begun\\nlast words", flush=True)
if what == "row":
    with open(results, "a") as file:
        row = {"key": sys.argv[4], "status": "measured", "micro_batch_size": job["micro_batch_size"], "tried": job["tried"]}
        file.write(json.dumps(row) + "\\n")
elif what == "crash":
    os.kill(os.getpid(), signal.SIGSEGV)
elif what == "hang":
    time.sleep(600)
else:
    sys.exit(what)
"""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By micro batch size: what a process does in place of measuring; an exit code, `row`, `crash` or `hang`."""
    planned: dict[str, Any] = {}

    def command(job: Job, results: Path) -> list[str]:
        return [sys.executable, "-S", "-c", SCRIPT, job.to_json(), str(results), json.dumps(planned), job.key]

    monkeypatch.setattr(gpu, "command_of", command)
    return planned


@pytest.mark.slow
def test_the_largest_micro_batch_that_fits_is_measured(plan: dict[str, Any], tmp_path: Path) -> None:
    plan.update({"8": DID_NOT_FIT, "4": DID_NOT_FIT, "2": "row", "1": "crash"})
    results = tmp_path / "results.jsonl"
    gpu.measure(replace(TOY, micro_batch_sizes=(8, 4, 2, 1)), results, tmp_path / "logs", gpu.Session(60.0))
    assert [(row["micro_batch_size"], row["tried"]) for row in read(results)] == [(2, [8, 4])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "seconds", "reason"),
    [
        ("crash", 60.0, f"ended by {signal.SIGSEGV.name}; it said last: last words"),
        (3, 60.0, "ended with exit code 3; it said last: last words"),
        ("hang", 1.0, "took more than 1 seconds; it said last: last words"),
    ],
)
def test_a_process_that_leaves_no_row_becomes_one(
    what: str | int, seconds: float, reason: str, plan: dict[str, Any], tmp_path: Path
) -> None:
    plan["2"] = what
    results = tmp_path / "results.jsonl"
    gpu.measure(TOY, results, tmp_path / "logs", gpu.Session(seconds))
    (row,) = read(results)
    assert (row["status"], row["key"], row["contender"]) == ("failed", TOY.key, OURS)
    assert row["reason"].startswith(reason)
    assert f"| tiny  | ours         | {reason}" in tables([row])


@pytest.mark.slow
def test_what_the_commands_end_cuts_off_leaves_no_row(plan: dict[str, Any], tmp_path: Path) -> None:
    plan["2"] = "hang"
    results = tmp_path / "results.jsonl"
    end = time.monotonic() + gpu.ENDS_SECONDS + 1.0
    with pytest.raises(gpu.CutOffError):
        gpu.measure(TOY, results, tmp_path / "logs", gpu.Session(60.0, end))
    assert read(results) == []
    with pytest.raises(gpu.CutOffError):
        gpu.measure(TOY, results, tmp_path / "logs", gpu.Session(60.0, time.monotonic()))


@pytest.mark.slow
def test_without_a_gpu_nothing_is_written(
    plan: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan["8"] = NO_DEVICE
    words = ["--shapes", "gpt-1.3b", "--contenders", OURS, "--results", str(tmp_path / "r"), "--logs", str(tmp_path)]
    assert gpu.main(words) == 2
    assert "torch finds no GPU" in capsys.readouterr().err and not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_contender_that_is_not_installed_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_contenders.contenders.find_spec", lambda name: None)
    job = replace(TOY, contender="megatron_te", device="cuda")
    gpu.measure(job, tmp_path / "r", tmp_path, gpu.Session(1.0))
    assert (
        read(tmp_path / "r")[0]["reason"]
        == "megatron_te needs megatron and transformer_engine, which are not installed"
    )
    assert "needs torchao, which is not" in str(CONTENDERS["plain_fp8"].refusal("plain_fp8", TOY))
    for name, shape, reason in (
        ("torchtitan", "tiny", "no model with learned positions"),
        ("transformers", "llama-8b-8k", "is for ours alone"),
    ):
        monkeypatch.setattr("benchmarks.gpu_contenders.contenders.find_spec", lambda name: True)
        assert reason in str(CONTENDERS[name].refusal(name, replace(TOY, shape=shape)))


def test_the_file_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    words = ["--device", "cpu", "--shapes", "tiny", "--contenders", OURS, "transformers", "--results", str(results)]
    asked: list[str] = []

    def measure(job: Job, results: Path, logs: Path, session: gpu.Session) -> None:
        asked.append(job.contender)
        if job.contender == OURS:
            append(results, measured(job, a_run(0.5), {"before": 2.0, "after": 4.0}, HERE))
        else:
            append(results, failed(job, "it broke", HERE))

    monkeypatch.setattr(gpu, "measure", measure)
    for more, expected in (
        ([], [OURS, "transformers"]),
        ([], []),
        (["--retry-failed"], ["transformers"]),
        (["--again"], [OURS, "transformers"]),
        (["--steps", "31"], [OURS, "transformers"]),
        (["--table", "--again"], []),
    ):
        asked.clear()
        assert gpu.main([*words, *more]) == 0
        assert asked == expected, more
    said = capsys.readouterr().out
    assert "tiny ours: in the file already, measured" in said and "it broke" in said
    # A line that was being written when its process was killed.
    with results.open("a") as file:
        file.write('{"key": "half')
    rows = read(results)
    assert len(rows) == 7 and len(newest(rows)) == 4
    assert rows[0]["ceiling_tflops"] == {"before": 2.0, "after": 4.0, "mean": 3.0}


# Tables.


@pytest.mark.slow
def test_tables() -> None:
    off = OPTIMISATIONS[-1]
    words = off.on
    base = replace(TOY, words=words)
    rows = [
        measured(base, a_run(0.5, 0.5), {"before": 1e-4, "after": 1e-4}, HERE),
        measured(
            replace(base, words=overridden(words, off.off), variant=off.name),
            a_run(1.0, 1.0),
            {"before": 1e-4, "after": 1e-4},
            HERE,
        ),
        measured(replace(TOY, contender="transformers"), a_run(0.6, 0.6), {"before": 1e-4, "after": 1e-4}, HERE),
        measured(replace(TOY, contender="megatron"), a_run(0.9, 0.9), {"before": 1e-4, "after": 1e-4}, HERE),
        failed(replace(TOY, contender="plain_compile"), "too\nlarge | by far", HERE),
    ]
    milliseconds = dict.fromkeys((*process_classes(), "idle"), 0.0) | {"GEMM": 400.0, "idle": 100.0}
    rows[0]["breakdown"] = {"milliseconds": milliseconds}
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables(rows).splitlines() if "|" in line]
    fastest = [line for line in lines if line[0] == "tiny" and len(line) == 11 and line[3].isdigit()]
    assert [(line[1], line[3]) for line in fastest] == [(OURS, "256"), ("transformers", "213"), ("megatron", "142")]
    assert ["tiny", fastest[0][9], "", "transformers", "1.200", "1.1"] in lines
    assert ["tiny", off.name, " ".join(off.off), "2.000", "128", "2, 2"] in lines
    assert ["tiny", "500.0", "400.0 (80.0%)", *["0.0 (0.0%)"] * 8, "100.0 (20.0%)"] in lines
    assert ["tiny", "plain_compile", "too large / by far"] in lines
    assert one_line("x" * 300).endswith("x ...")


@pytest.mark.slow
def test_the_table_of_fp8() -> None:
    """Each contender beside itself in bf16, ours beside the best of the others in FP8; the first table has them all."""

    def row(contender: str, seconds: float, shape: str = "gpt-1.3b", fp8: float | None = None) -> dict[str, Any]:
        ceilings = None if fp8 is None else {"before": fp8, "after": fp8}
        job = replace(TOY, shape=shape, contender=contender)
        return measured(job, a_run(seconds), {"before": 1.0, "after": 1.0}, HERE, fp8_ceilings=ceilings)

    rows = [row(OURS, 1.2), row("ours_fp8", 1.0, fp8=2.0), row("ours_fp8_blocks", 2.4, fp8=2.0)]
    rows += [row("megatron_fp8", 1.5, fp8=2.0), row("torchtitan_fp8", 1.6, fp8=2.0), row("torchtitan", 2.0)]
    rows += [row("plain_fp8", 1.0, "gpt-2.7b", fp8=2.0)]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables(rows).splitlines() if "|" in line]
    r = {one["contender"]: f"{one['model_tflops_causal'] / 2:.3f}" for one in rows if one["shape"] == "gpt-1.3b"}
    assert [line for line in lines if len(line) == 8 and line[6] == "2"] == [
        ["gpt-1.3b", "ours_fp8", "1.200", "1.15", "megatron_fp8", "1.500", "2", r["ours_fp8"]],
        ["gpt-1.3b", "megatron_fp8", "", "", "", "", "2", r["megatron_fp8"]],
        ["gpt-1.3b", "torchtitan_fp8", "1.250", "", "", "", "2", r["torchtitan_fp8"]],
        ["gpt-1.3b", "ours_fp8_blocks", "0.500", "1.15", "megatron_fp8", "0.625", "2", r["ours_fp8_blocks"]],
        ["gpt-2.7b", "plain_fp8", "", "", "", "", "2", f"{rows[-1]['r_fp8']:.3f}"],
    ]
    # bf16 is compared with bf16.
    assert ["gpt-1.3b", f"{rows[0]['r']:.3f}", "0.62", "torchtitan", "1.667", "1.1"] in lines
    assert sum(line[0] == "gpt-1.3b" and len(line) == 11 for line in lines) == 6


def process_classes() -> tuple[str, ...]:
    from benchmarks.gpu_contenders.kernel_classes import CLASSES

    return CLASSES


# The whole of it.


@pytest.mark.slow
@pytest.mark.distributed
def test_ours_runs_through_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Command, process, ceiling, the real run with its trace, row and table; the second command finds the row."""
    results = tmp_path / "results.jsonl"
    words = [
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--shapes",
        "tiny",
        "--contenders",
        OURS,
        "--steps",
        "3",
        "--warm-up",
        "1",
    ]
    more = [
        "--ceiling-size",
        "64",
        "--ceiling-seconds",
        "0",
        "--results",
        str(results),
        "--logs",
        str(tmp_path / "logs"),
    ]
    for _ in range(2):
        assert gpu.main([*words, *more]) == 0
    (row,) = read(results)
    assert row["status"] == "measured", row
    assert len(row["all_step_seconds"]) == 3 and row["peak_memory_bytes"] is None and row["breakdown"] is None
    assert row["first_loss"] == pytest.approx(5.70, abs=0.1)
    assert row["r"] == pytest.approx(row["model_tflops_causal"] / row["ceiling_tflops"]["mean"])
    assert "attention: sdpa" in row["settings"]["kernels"] and row["versions"]["torch"] == torch.__version__
    assert row["command"].startswith("python -m benchmarks.gpu --device cpu")
    assert "in the file already" in capsys.readouterr().out
