"""`verify --subject`: another engine in place of ours, and what is said of the mistakes that it is told to make."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.launch.command_line import TRIAXIS, run
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.launch.cli import main
from triaxis.launch.verify.subject import run as subject
from triaxis.launch.verify.subject.files import Reference
from triaxis.launch.verify.subject.run import AXES, Adapter, ReportError, SubjectTrial, covering_layouts, read_adapter
from triaxis.launch.verify.verdict.records import ParameterFacts

SUBJECTS = Path(__file__).with_name("subjects")
PLAIN, CONFIG = SUBJECTS / "plain_torch.py", SUBJECTS / "gpt2.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("", ("equal: all of 1 comparison",)),
        (
            "no sum in backward",
            ("gradient:", "likely cause: tp:", "transformer.h.0.ln_1.weight", "vanishes with tp=1; it stays with dp=1"),
        ),
        ("averaged", ("gradient:", "likely cause: dp:", "  0.5  ", "vanishes with dp=1; it stays with tp=1")),
        ("local tokens", ("different, first in step 1, loss", "likely cause: dp:", "2 times what it should be")),
        ("local norm", ("different, first in step 1, gradient norm", "likely cause: tp:", "every gradient is right")),
    ],
)
def test_a_plain_engine_and_its_mistakes(
    mistake: str, says: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISTAKE", mistake)
    found = run(tmp_path, *TRIAXIS, "verify", str(CONFIG), "--subject", str(PLAIN), "--layout", "tp=2,dp=2")
    assert found.exit_code == (1 if mistake else 0), found.err
    said = " ".join(found.out.split())
    assert all(one in said or one in found.out for one in says), found.out


def test_layouts_cover_the_declared_axes() -> None:
    plain = read_adapter(PLAIN)
    assert plain.axes == ("tp", "dp")
    assert covering_layouts(plain) == [{"tp": 2, "dp": 2}, {"tp": 2, "dp": 1}, {"tp": 1, "dp": 2}]
    assert covering_layouts(replace(plain, smallest={**plain.smallest, "dp": 2})) == [{"tp": 2, "dp": 2}]
    four = covering_layouts(replace(plain, axes=AXES))
    assert all(1 < one["tp"] * one["pp"] * one["dp"] * one["cp"] <= 8 for one in four)
    assert any(one["tp"] == one["cp"] == 2 for one in four) and any(one["pp"] == one["dp"] == 2 for one in four)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "AXES = ('tp', 'experts')",
        "AXES = (",
        "AXES = ('tp')",
        "AXES = sizes",
        "AXES = ('tp',)\nSMALLEST = {'dp': 2}",
        "AXES = ('tp',)\nSMALLEST = {'tp': 3}",
    ],
)
def test_a_file_that_declares_no_axes_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match="--subject"):
        read_adapter(tmp_path / "mine.py")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--layout", "pp=2"], "--layout pp=2: the adapter declares tp, dp"),
        (["--layout", "tp=2 dp"], "--layout dp: the adapter declares tp, dp"),
        (["--timeout", "0"], "--timeout 0: must be at least 1 second"),
        (["--layout", "dp=2", "--layout", "tp=0"], "--layout tp=0: the adapter declares tp, dp"),
        (
            ["--against", "megatron-core", "model.hidden_dropout=0.1"],
            "megatron-core draws masks from generators of its own",
        ),
        (["--dtype", "bf16"], "no rounding of it is known"),
        (["--full-size"], "runs another engine in small sizes"),
        (["model.hidden_dropout=0.1"], "draws masks from generators of its own"),
    ],
)
def test_what_a_subject_cannot_be_asked_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(CONFIG), "--subject", str(PLAIN), "--dry-run", *words]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_what_is_of_a_subject_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--python", "python3", "--against", "triaxis", "--timeout", "9", "--layout", "tp=2", "--layout", "dp=2"]
    assert main(["verify", str(CONFIG), *words, "--dry-run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--python python3: it is for the adapter of --subject" in said
    assert "--timeout 9: it is for the adapter of --subject" in said
    assert "--against triaxis: it is for the adapter of --subject" in said
    assert "--layout tp=2 --layout dp=2: one layout is verified" in said


def test_ranks_that_do_not_end_are_named(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(ReportError, match=r"ranks \[0, 1\] did not finish within 1 second"):
        subject._start(
            SubjectTrial(Adapter(tmp_path / "waits.py", ("tp",), {}), sys.executable, (), (), most_seconds=1),
            tmp_path,
            2,
        )


def reported(folder: Path, tensors: dict[str, torch.Tensor], steps: int = 1) -> None:
    folder.mkdir()
    told = {"rank": 0, "place": {"tp": 0}, "steps": [{"loss": 1.0, "grad_norm": 2.0, "num_tokens": 8}] * steps}
    (folder / "rank_00000.json").write_text(json.dumps(told))
    save_file(tensors, folder / "rank_00000.step_00.safetensors")


def test_reports_that_cannot_be_compared_are_named(tmp_path: Path) -> None:
    whole = {"gradient:w": torch.ones(2), "parameter:w": torch.ones(2)}
    parameters = (ParameterFacts("w", decay=True, stage=0),)
    reported(tmp_path / "one", whole)
    one = Reference(tmp_path / "one", 1)
    for name, tensors, says in (
        ("half", {**whole, "gradient:w": torch.ones(1)}, r"shape \[1\], and one process \[2\]: whole tensors"),
        (
            "other",
            {**whole, "gradient:x": torch.ones(2)},
            "gradient of x, a name that the one-process run does not report",
        ),
        ("less", {"gradient:w": torch.ones(2)}, "no rank reports the parameter of w in step 1"),
    ):
        reported(tmp_path / name, tensors)
        with pytest.raises(ReportError, match=says):
            one.reports(tmp_path / name, parameters, ParallelSizes())
    with pytest.raises(ReportError, match=r"rank 1 has ended without job.close"):
        one.reports(tmp_path / "one", parameters, ParallelSizes(tp=2))
    reported(tmp_path / "none", whole, steps=0)
    with pytest.raises(ReportError, match="rank 0 reports 0 steps, but one process 1"):
        one.reports(tmp_path / "none", parameters, ParallelSizes())
    reported(tmp_path / "beside", whole)
    (tmp_path / "beside" / "rank_00001.json").write_text((tmp_path / "one" / "rank_00000.json").read_text())
    (tmp_path / "beside" / "rank_00001.step_00.safetensors").write_bytes(
        (tmp_path / "one" / "rank_00000.step_00.safetensors").read_bytes()
    )
    with pytest.raises(ReportError, match=r"rank 1 closes its job at the place .*, and rank 0 has it too"):
        one.reports(tmp_path / "beside", parameters, ParallelSizes(tp=2))
    (alone,) = one.reports(tmp_path / "one", parameters, ParallelSizes())
    assert [one.deviation.error for one in alone.tensors] == [0.0, 0.0]
