"""`triaxis verify`: exit codes, certificate, and what a person reads."""

import json
from pathlib import Path

import pytest

import launch.commands.verify as command
from engine.verify.judge import Cause, Difference, Verdict
from launch.cli import main
from launch.verify import Trial, VerificationError
from tests.launch.command_line import ROOT

CONFIG = ["verify", "--config", str(ROOT / "configs" / "gpt_tiny.yaml")]

WRONG = Verdict(
    {"start": (0.0, "embedding.word.weight"), "gradient": (1.0, "final_norm.weight"), "loss": (1e-16, "")},
    tuple(
        Difference(0, "gradient", name, 2.0, 4.0, 1.0, 2.0 if number else None)
        for number, name in enumerate(
            ["final_norm.weight", *(f"layers.{layer}.mlp.norm.weight" for layer in range(19))]
        )
    ),
    Cause("tp", "each tp rank has only its part of this gradient"),
)


def verdict_is(monkeypatch: pytest.MonkeyPatch, verdict: Verdict) -> list[Trial]:
    asked: list[Trial] = []

    def answer(trial: Trial) -> Verdict:
        asked.append(trial)
        return verdict

    monkeypatch.setattr(command, "verify", answer)
    return asked


@pytest.mark.distributed
def test_a_layout_gets_its_certificate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TP", "1"
    )  # the layout on the command line and the environment agree, and the reference is neither's
    path = tmp_path / "certificate.json"
    assert main([*CONFIG, "--layout", "tp=1,pp=2,vpp=1", "--steps", "2", "--json", str(path)]) == 0
    out = capfd.readouterr().out
    assert "tp=1 pp=2 vpp=1 dp=1 against one process: 2 steps in float64" in out
    assert out.rstrip().endswith("equal: this layout trains the same model.")
    certificate = json.loads(path.read_text())
    assert certificate["equal"] and certificate["differences"] == [] and certificate["likely_cause"] is None
    kinds = ["start", "output", "loss", "gradient", "gradient norm", "master", "exp_avg", "exp_avg_sq", "parameter"]
    assert list(certificate["largest_errors"]) == kinds
    assert all(one["error"] <= certificate["tolerance"] for one in certificate["largest_errors"].values())
    assert certificate["config"]["parallel"]["pp"] == 2


def test_a_difference_is_shown_with_its_likely_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (asked,) = (verdict_is(monkeypatch, WRONG),)
    path = tmp_path / "certificate.json"
    assert main([*CONFIG, "--layout", "tp=2,sp=true", "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert "different, first in step 1, gradient:" in out and "and 8 more" in out
    assert out.rstrip().endswith("likely cause: tp: each tp rank has only its part of this gradient.")
    assert asked[0].config.parallel.sequence_parallel and not asked[0].reference.parallel.sequence_parallel
    certificate = json.loads(path.read_text())
    assert len(certificate["differences"]) == 20 and certificate["differences"][1]["factor"] == 2.0
    assert certificate["likely_cause"]["axis"] == "tp"


def test_sizes_are_the_configs_own_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = verdict_is(monkeypatch, Verdict({}, (), None))
    assert main([*CONFIG, "--full-size", "--dtype", "bf16"]) == 0
    (one,) = asked
    assert one.config.model.hidden_size == 128 and one.config.precision.dtype == "bf16"
    assert str(one.config.parallel.tp) == "2" and one.reference.parallel.tp == 1


def test_what_cannot_be_run_is_neither_equal_nor_different(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(trial: Trial) -> Verdict:
        raise VerificationError(1)

    monkeypatch.setattr(command, "verify", fail)
    assert main(CONFIG) == 2
    assert "nothing was compared" in capsys.readouterr().err


def test_a_matrix_says_each_verdict_and_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = verdict_is(monkeypatch, Verdict({"loss": (1e-16, "")}, (), None))
    path = tmp_path / "matrix.json"
    assert main([*CONFIG, "--matrix", "--max-ranks", "4", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("equal      1.0e-16") == len(asked) > 3
    assert f"equal: all {len(asked)} layouts train the same models as one process (3 steps in float64)." in out
    tree = json.loads(path.read_text())
    assert tree["equal"] and len(tree["trials"]) == len(asked) and tree["trials"][0]["features"]["tp"] == 2

    verdict_is(monkeypatch, WRONG)
    assert main([*CONFIG, "--matrix", "--max-ranks", "2"]) == 1
    out = capsys.readouterr().out
    assert "layouts do not train the same model." in out and "likely cause" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "tp=2,ep=2"], "'ep=2' is not one of tp=.., pp=.."),
        (["--layout", "tp=2,tp=4"], "each at most once"),
        (["--layout", "tp=3"], "model.num_attention_heads"),
        (["--steps", "0"], "at least one step"),
        (["--matrix", "--layout", "tp=2"], "would be ignored"),
        (["--matrix", "--max-ranks", "1"], "the reference itself"),
        (["optimizer.learning_rate=1"], "unknown key"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main([*CONFIG, *words]) == 2
    assert said in capsys.readouterr().err
