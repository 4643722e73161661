"""The first run on a card: its pieces, a real one on the CPU that is not run twice, and the block of a folder that is made up."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import first_card
from benchmarks.first_card import FAILED, NODE, NOT_RUN, PASSED, RECORDS, ROWS, Piece, block, pieces, recorded
from benchmarks.gpu_contenders.contenders import CONTENDERS
from benchmarks.gpu_contenders.records import append, failed, measured
from tests.benchmarks.test_gpu import HERE, TOY, a_run
from tests.documented import ROOT
from triaxis.engine.telemetry.record.peaks import known_peak


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIAXIS_DEVICE", "cpu")


def say(text: str, code: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"print({text!r}); raise SystemExit({code})")


def test_the_script_lists_its_pieces_in_the_order_of_their_worth(tmp_path: Path) -> None:
    words = ["bash", str(ROOT / "benchmarks" / "first_card.sh"), "--list", "--folder", str(tmp_path)]
    variables = os.environ | {"TRIAXIS_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True, timeout=60)
    names = [line.split()[0] for line in said.stdout.splitlines()]
    assert names[:7] == ["doctor", "gpu-tests", "parity", "layout", "matrix", "speed-gpt-1.3b", "speed-gpt-2.7b"]
    assert names.index("peers-gpt-1.3b") < names.index("fp8-gpt-1.3b")
    assert not list(tmp_path.iterdir())


def test_every_contender_is_in_a_piece_and_layouts_fit_the_cards(tmp_path: Path) -> None:
    for count, layout in ((1, "tp=2"), (2, "tp=2"), (5, "tp=2,pp=2"), (16, "tp=2,pp=2,vpp=2,dp=2")):
        found = {piece.name: piece for piece in pieces(count, tmp_path)}
        assert found["layout"].command[-1] == layout
        assert (found["layout"].least_gpus, found["parity"].least_gpus) == (2, 1)
        words = {word for piece in found.values() for word in piece.command}
        assert words >= {*CONTENDERS, "--matrix"}
    asked = {piece.name: piece.command for piece in pieces(1, tmp_path, ["tiny", "llama-8b-4k"])}
    assert {name for name in asked if name.startswith("speed")} == {"speed-tiny", "speed-llama-8b-4k"}
    assert "--ceiling-size" in asked["speed-tiny"] and "--ceiling-size" not in asked["speed-llama-8b-4k"]
    on_cpu = {piece.name: piece for piece in pieces(0, tmp_path)}
    assert {name for name, piece in on_cpu.items() if piece.least_gpus} == {"gpu-tests", "parity", "matrix"}


@pytest.mark.slow
def test_a_piece_runs_once_and_what_needs_a_card_says_so(
    tmp_path: Path, on_a_cpu: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run = f"from pathlib import Path; Path({str(tmp_path / 'runs')!r}).open('a').write('x'); print('4 passed')"
    made = [Piece("counts", "what", 1, (sys.executable, "-c", run)), Piece("parity", "", 1, say("never"), 1)]
    monkeypatch.setattr(first_card, "pieces", lambda *_: iter(made))
    folder = tmp_path / "records"
    for runs, words in (("x", ()), ("x", ()), ("xx", ("--only", "counts"))):
        assert first_card.main(["--folder", str(folder), *words]) == 0
        assert (tmp_path / "runs").read_text() == runs
    said = capfd.readouterr().out
    assert said.count("counts: recorded, passed") == 1
    assert "parity: not run (0 s): needs 1 or more GPUs, and torch finds 0" in said
    assert {name: one["status"] for name, one in recorded(folder).items()} == {"counts": PASSED, "parity": NOT_RUN}
    assert recorded(folder)["counts"]["said"] == "4 passed"


@pytest.mark.slow
@pytest.mark.distributed
def test_the_doctor_is_the_head_of_the_block(tmp_path: Path, on_a_cpu: None, capfd: pytest.CaptureFixture[str]) -> None:
    """The real piece, which every machine can run."""
    assert first_card.main(["--only", "doctor", "--folder", str(tmp_path)]) == 0
    assert first_card.main(["--only", "speed-tiny", "--folder", str(tmp_path)]) == 0
    said = capfd.readouterr().out
    assert "doctor: passed" in said and "nothing is out of line" in said
    assert "no GPU: a try on a CPU" in said and "torch 2" in said and "megatron-core 0" in said
    assert "tokens/s, micro batch 2, r " in said


@pytest.mark.slow
def test_a_piece_that_fails_or_takes_too_long_is_a_record(
    tmp_path: Path, on_a_cpu: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = str(tmp_path / "there" / ROWS)
    row = failed(TOY, "out of luck", HERE | {"commit": "abc"})
    made = [
        Piece("fails", "", 1, say("1 failed", 1)),
        Piece("hangs", "", 0, (sys.executable, "-c", "import time; time.sleep(60)")),
        Piece("lacks", "", 1, say("a table"), wants=(TOY.shape, TOY.contender)),
    ]
    monkeypatch.setattr(first_card, "pieces", lambda *_: iter(made))
    append(Path(rows), row)
    assert first_card.main(["--folder", str(tmp_path / "there")]) == 1
    found = recorded(tmp_path / "there")
    assert {one["status"] for one in found.values()} == {FAILED}
    assert found["fails"]["said"] == "1 failed" and found["lacks"]["said"] == "out of luck"
    assert "took more than 0 minutes (bash benchmarks/first_card.sh --only hangs tries again)" in found["hangs"]["said"]
    with pytest.raises(SystemExit):
        first_card.main(["--folder", str(tmp_path), "--only", "nothing"])
    assert "the pieces here are fails, hangs, lacks" in capfd.readouterr().err


@pytest.mark.slow
def test_a_machine_without_a_card_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TRIAXIS_DEVICE", raising=False)
    assert first_card.main(["--folder", str(tmp_path)]) == 2
    assert "TRIAXIS_DEVICE=cpu bash benchmarks/first_card.sh" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_block_has_card_versions_verdicts_and_speeds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gpu = "NVIDIA H100 80GB HBM3"
    facts = {
        "python": "3.12.1",
        "GPU": gpu,
        "GPU memory": "80 GiB",
        "driver": "580.1",
        "CUDA": "13.0",
        "NCCL": "2.29.7",
    }
    packages = [
        {"name": "torch", "version": "2.13.0", "problem": "", "use": ""},
        {"name": "transformer-engine", "version": "2.10", "problem": "no CUDA", "use": ""},
        {"name": "apex", "version": "", "problem": "", "use": ""},
    ]
    (tmp_path / NODE).write_text(json.dumps({"ranks": [{"equal": facts, "packages": packages}]}))
    for piece, status, said in (
        ("parity", PASSED, "24 passed, 3 skipped"),
        ("matrix", NOT_RUN, "needs 2 or more GPUs"),
    ):
        append(tmp_path / RECORDS, {"piece": piece, "status": status, "said": said, "commit": "abc123"})
    job = replace(TOY, shape="gpt-1.3b", dtype="bf16", device="cuda")
    for contender, seconds in (("ours", 4.0), ("megatron_te", 5.0), ("ours_fp8", 2.0)):
        row = measured(replace(job, contender=contender), a_run(seconds), {"before": 700.0}, HERE)
        append(tmp_path / ROWS, row)
    append(tmp_path / ROWS, failed(replace(job, contender="transformers"), "not installed", HERE))
    assert first_card.main(["--block", "--folder", str(tmp_path)]) == 0
    text = capfd.readouterr().out
    assert text == block(tmp_path) + "\n"
    lines = {line[:22].strip(): line[22:].strip() for line in text.splitlines()}
    assert lines["card"] == f"{gpu}, GPU memory 80 GiB, driver 580.1, CUDA 13.0, NCCL 2.29.7"
    assert lines["commit"] == "abc123"
    assert "transformer-engine 2.10 (not usable: no CUDA), apex not found" in lines["versions"]
    assert lines["parity"] == "passed: 24 passed, 3 skipped" and lines["matrix"].startswith("not run: needs 2")
    # 64k tokens a step, 8.470 GFLOPs each, in 4 s.
    peak = known_peak(gpu, "bf16")
    assert peak is not None
    mfu = 2**16 / 4 * 8.470e9 / (peak.tflops * 1e12)
    assert lines["gpt-1.3b ours"].startswith(f"16,384 tokens/s, micro batch 2, MFU {mfu:.1%}, r 0.")
    assert lines["gpt-1.3b megatron_te"].endswith("ours / it 1.250")
    assert f"MFU {mfu:.1%}" in lines["gpt-1.3b ours_fp8"] and lines["gpt-1.3b ours_fp8"].endswith("over bf16 2.000")
    assert lines["gpt-1.3b transformers"] == "not measured: not installed"
