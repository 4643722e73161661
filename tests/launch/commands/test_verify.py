"""`triaxis verify`: exit codes, certificate, and what a person reads."""

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import triaxis.launch.commands.verify as command
from tests.lacking import need_package
from tests.launch.command_line import ROOT
from tests.launch.forked_ranks import fork_ranks_of
from tests.verify.oracles import COMPARED
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.launch.cli import main
from triaxis.launch.verify import oracle as verify_oracle
from triaxis.launch.verify.oracle import OracleTrial
from triaxis.launch.verify.run import CLIP, Trial, VerificationError
from triaxis.launch.verify.verdict.judge import Cause, Difference, Verdict
from triaxis.launch.verify.verdict.records import StepFacts
from triaxis.models.gpt.mlp import MLP

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

    monkeypatch.setattr(command, "verify_layout", answer)
    return asked


@pytest.mark.distributed
def test_a_layout_gets_its_certificate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TP", "1"
    )  # the layout on the command line and the environment agree, and the reference is neither's
    path = tmp_path / "certificate.json"
    assert main([*CONFIG, "--layout", "tp=1,pp=2,vpp=1", "--steps", "2", "--output", str(path)]) == 0
    out = capfd.readouterr().out
    assert "tp=1 pp=2 vpp=1 dp=1 against one process: 2 steps in float64" in out
    assert out.rstrip().endswith("equal: this layout trains the same model.")
    assert "clipping was not at work" not in out
    certificate = json.loads(path.read_text())
    assert [step["grad_norm"] > CLIP for step in certificate["reference_steps"]] == [True, True]
    assert certificate["equal"] and certificate["differences"] == [] and certificate["likely_cause"] is None
    kinds = ["samples", "start", "output", "loss", "gradient", "gradient norm", "master", "exp_avg", "exp_avg_sq"]
    kinds.append("parameter")
    assert list(certificate["largest_errors"]) == kinds
    assert all(one["error"] <= certificate["tolerance"] for one in certificate["largest_errors"].values())
    assert certificate["config"]["parallel"]["pp"] == 2


def test_a_difference_is_shown_with_its_likely_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (asked,) = (verdict_is(monkeypatch, WRONG),)
    path = tmp_path / "certificate.json"
    assert main([*CONFIG, "--layout", "tp=2,sp=true", "--output", str(path)]) == 1
    out = capsys.readouterr().out
    assert "different, first in step 1, gradient:" in out and "and 8 more" in out
    assert out.rstrip().endswith("likely cause: tp: each tp rank has only its part of this gradient.")
    assert asked[0].config.parallel.sequence_parallel and not asked[0].reference.parallel.sequence_parallel
    certificate = json.loads(path.read_text())
    assert len(certificate["differences"]) == 20 and certificate["differences"][1]["factor"] == 2.0
    assert certificate["likely_cause"]["axis"] == "tp"


def test_steps_that_were_not_clipped_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = tuple(StepFacts(loss=3.0, grad_norm=norm, num_tokens=9) for norm in (CLIP / 4, 2 * CLIP, CLIP / 2))
    verdict_is(monkeypatch, Verdict({"loss": (1e-16, "")}, (), None, steps))
    assert main([*CONFIG, "--layout", "tp=2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "clipping was not at work in 2 of 3 steps: the gradient norm was at most 0.25, and 0.5 is the limit" in out


def test_sizes_are_the_configs_own_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = verdict_is(monkeypatch, Verdict({}, (), None))
    assert main([*CONFIG, "--full-size", "--dtype", "bf16"]) == 0
    (one,) = asked
    assert one.config.model.hidden_size == 128 and one.config.precision.dtype == "bf16"
    assert str(one.config.parallel.tp) == "2" and one.reference.parallel.tp == 1


def test_an_fp16_config_is_verified_in_float64_without_its_scale_and_in_fp16_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = verdict_is(monkeypatch, Verdict({}, (), None))
    words = [*CONFIG, "precision.dtype=fp16", "precision.loss_scale={initial: 1024}"]
    assert main(words) == 0 and main([*words, "--dtype", "fp16"]) == 0
    wide, narrow = asked
    assert (wide.config.precision.dtype, wide.config.precision.loss_scale, wide.noise) == ("float64", None, None)
    scaling = narrow.config.precision.scaling
    assert scaling is not None and scaling.initial == 1024.0
    assert (
        narrow.noise is not None and narrow.noise.precision.dtype == "fp32" and narrow.noise.precision.scaling is None
    )


def test_what_cannot_be_run_is_neither_equal_nor_different(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(trial: Trial) -> Verdict:
        raise VerificationError(1)

    monkeypatch.setattr(command, "verify_layout", fail)
    assert main(CONFIG) == 2
    assert "nothing was compared" in capsys.readouterr().err


def keep_a_parameter_of_its_own() -> None:
    made = MLP.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        self.scale = torch.nn.Parameter(torch.ones(4))

    MLP.__init__ = init  # type: ignore[method-assign]


@pytest.mark.distributed
def test_a_model_that_is_refused_has_no_certificate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks_of(monkeypatch, "triaxis.launch.verify.run", keep_a_parameter_of_its_own)
    path = tmp_path / "certificate.json"
    assert main([*CONFIG, "--layout", "tp=2", "--output", str(path)]) == 2
    said = capsys.readouterr()
    assert "layers.*.mlp, MLP.scale: float32 [4]" in said.err and "nothing was compared" in said.err
    assert "equal" not in said.out and not path.exists()


def test_a_matrix_says_each_verdict_and_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = verdict_is(monkeypatch, Verdict({"loss": (1e-16, "")}, (), None))
    path = tmp_path / "matrix.json"
    assert main([*CONFIG, "--matrix", "--max-ranks", "4", "--output", str(path)]) == 0
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
        (["--oracle", "megatron-core", "--matrix"], "--oracle would be ignored"),
        (["--oracle", "megatron-core", "--dtype", "bf16"], "Give one of float64, fp32"),
        (["--oracle", "megatron-core", "schedule.name=gpipe"], "this word would be ignored"),
        (["--oracle", "megatron-core", "model.hidden_dropout=0.1"], "Add model.hidden_dropout=0"),
        (["--oracle", "megatron-core", "model.position=rope", "model.mtp={}"], "Add model.mtp=null"),
        (
            ["--oracle", "megatron-core", 'optimizer.groups=[{match: "embedding.*", freeze: true}]'],
            "Add optimizer.groups=[]",
        ),
        (
            ["--oracle", "megatron-core", "model.qk_norm=true", "model.norm=layernorm"],
            "normalise queries and keys by it",
        ),
        (["--oracle", "transformers", "model.norm=layernorm"], "as llama: model.norm = layernorm, there it is rmsnorm"),
        (["--oracle", "transformers", "model.num_attention_heads=1"], "model.num_attention_heads"),
        (["--oracle", "megatron-core", "data.attention=within", "model.window=4"], "Add data.attention=across"),
        (["--oracle", "transformers", "model.z_loss=1e-5"], "Add model.z_loss=0"),
        (["--oracle", "megatron-core", "data.positions=document"], "Add data.positions=sample"),
        (["--layout", "tp=2,xp=2"], "'xp=2' is not one of tp=.., cp=.., pp=.."),
        (["--layout", "tp=2,tp=4"], "each at most once"),
        (["--layout", "tp=3"], "model.num_attention_heads"),
        (["--steps", "0"], "must be at least 1"),
        (["--steps", str(2**40 + 1), "--dry-run"], "--steps 1099511627777: must be at most 1,099,511,627,776"),
        (["--matrix", "--max-ranks", str(2**20 + 1), "--dry-run"], "--max-ranks 1048577: must be at most 1,048,576"),
        (["--matrix", "--layout", "tp=2"], "would be ignored"),
        (["--matrix", "--max-ranks", "1"], "the reference itself"),
        (["optimizer.learning_rate=1"], "unknown key"),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    is_installed(monkeypatch)
    assert main([*CONFIG, *words]) == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_says_as_json_what_it_would_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CONFIG, "--layout", "tp=2,pp=2", "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    (one,) = planned["trials"]
    assert (planned["against"], one["layout"], one["config"]["parallel"]["tp"]) == (
        "one process",
        "tp=2 pp=2 vpp=1 dp=1",
        2,
    )


@pytest.mark.parametrize(
    ("name", "layout", "stages"),
    [("llama3_405b", "tp=2,pp=2", [2, 2]), ("llama3_8b_128k", "tp=2,pp=2", [2, 2]), ("deepseek_v3", "dp=2", [3])],
)
def test_a_shipped_config_takes_a_layout_that_is_not_its_own(
    name: str, layout: str, stages: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory and its list of stages are of another layout."""
    asked = verdict_is(monkeypatch, Verdict({"loss": (1e-16, "")}, (), None))
    assert main(["verify", "--config", str(ROOT / "configs" / f"{name}.yaml"), "--layout", layout]) == 0
    config = asked[0].config
    assert [stage.num_own for stage in stages_of(config)] == stages and config.recompute.granularity == "full"


# Against somebody else's model ----------------------------------------------------------------------------------------------


def is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of an oracle runs in the test, so it may be missing on this machine."""
    monkeypatch.setattr(verify_oracle, "version", lambda package: "0.16.1")


def oracle_says(monkeypatch: pytest.MonkeyPatch, *verdicts: Verdict) -> list[OracleTrial]:
    asked: list[OracleTrial] = []

    def answer(trial: OracleTrial) -> Iterator[tuple[Trial, Verdict]]:
        asked.append(trial)
        yield from zip(trial.trials, verdicts, strict=False)

    monkeypatch.setattr(command, "verify_against", answer)
    is_installed(monkeypatch)
    return asked


@pytest.mark.slow
@pytest.mark.distributed
def test_an_oracle_in_a_process_of_its_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_ranks_of(monkeypatch, "triaxis.launch.verify.run")
    need_package("transformers", "pip install -e '.[hf]'")
    path = tmp_path / "certificate.json"
    words = ["--oracle", "transformers", "--layout", "pp=2", "--steps", "2", "--output", str(path)]
    assert main([*CONFIG, *words]) == 0
    out = capfd.readouterr().out
    assert "tp=1 pp=1 vpp=1 dp=1 against transformers" in out and "tp=1 pp=2 vpp=1 dp=1 against transformers" in out
    assert out.count("equal: this layout trains the same model.") == 2
    certificate = json.loads(path.read_text())
    assert certificate["equal"] and certificate["oracle"]["name"] == "transformers"
    one, layout = certificate["trials"]
    assert one["against"] == layout["against"] == f"transformers {certificate['oracle']['version']}"
    assert one["config"]["parallel"]["pp"] == 1 and layout["config"]["parallel"]["pp"] == 2
    assert list(layout["largest_errors"]) == COMPARED
    assert all(error["error"] <= layout["tolerance"] for error in layout["largest_errors"].values())


def test_without_a_layout_every_way_of_cutting_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    equal = Verdict({"loss": (1e-16, "")}, (), None)
    (asked,) = (oracle_says(monkeypatch, equal, WRONG, equal, equal),)
    path = tmp_path / "certificate.json"
    assert main([*CONFIG, "--oracle", "megatron-core", "--output", str(path)]) == 1
    out = capsys.readouterr().out
    assert "different, first in step 1, gradient:" in out and out.count("this layout trains the same model") == 3
    (trial,) = asked
    one, *layouts = (each.config for each in trial.trials)
    assert one == trial.trials[0].reference and all(each.model == one.model for each in layouts)
    assert one.train.steps == 5 and one.precision.dtype == "float64"
    parallel = [each.parallel for each in layouts]
    for size in ("tp", "pp", "vpp", "dp"):
        assert getattr(one.parallel, size) == 1 and any(getattr(each, size) == 2 for each in parallel), size
    assert any(each.sequence_parallel for each in parallel)
    certificate = json.loads(path.read_text())
    assert not certificate["equal"] and [each["equal"] for each in certificate["trials"]] == [True, False, True, True]


@pytest.mark.parametrize(("one_process", "num_runs"), [(WRONG, 1), (Verdict({}, (), None), 2)])
def test_layouts_are_not_run_when_our_one_process_differs(
    one_process: Verdict, num_runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def start(config: Config, place: Path, job: Mapping[str, object]) -> int:
        assert not list(place.parent.glob("rank_*.json")), "reports of the layout before are still there"
        (place.parent / f"rank_{len(started):05d}.json").touch()
        started.append(parallel_sizes(config).world_size)
        return 0

    monkeypatch.setattr(verify_oracle, "run_oracle", lambda *_: 0)
    monkeypatch.setattr(verify_oracle, "start_ranks", start)
    monkeypatch.setattr(verify_oracle, "verdict_against", lambda asked, one, folder: one_process)
    is_installed(monkeypatch)
    asked = verify_oracle.oracle_trial(
        ROOT / "configs" / "gpt_tiny.yaml",
        (),
        oracle="transformers",
        layout=("parallel.tp=2", "parallel.pp=2", "parallel.dp=1"),
        small=True,
        num_steps=1,
        dtype="fp32",
    )
    assert [verdict for _, verdict in verify_oracle.verify_against(asked)] == [one_process] * num_runs
    assert started == [1, 4][:num_runs]


def test_an_oracle_that_breaks_is_neither_equal_nor_different(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_installed(monkeypatch)
    monkeypatch.setattr(verify_oracle, "run_oracle", lambda *_: 1)
    assert main([*CONFIG, "--oracle", "transformers", "--layout", "tp=1"]) == 2
    assert "not everything was compared" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "said"), [(None, "megatron-core is not installed"), ("0.17.0", "patches for the CPU are for 0.16.x")]
)
def test_an_oracle_that_is_missing_or_unknown(
    version: str | None, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(package: str) -> str:
        if version is None:
            raise PackageNotFoundError(package)
        return version

    monkeypatch.setattr(verify_oracle, "version", answer)
    assert main([*CONFIG, "--oracle", "megatron-core"]) == 2
    err = capsys.readouterr().err
    assert said in err and "pip install 'megatron-core>=0.16,<0.17'" in err


def test_an_oracles_plan_starts_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = oracle_says(monkeypatch)
    assert main([*CONFIG, "--oracle", "megatron-core", "--layout", "tp=2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "-m triaxis.launch.verify.oracles.rank" in out and out.count("torch.distributed.run") == 2 and not asked


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_of_the_tables_is_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    is_installed(monkeypatch)
    asked = verify_oracle.oracle_trial(
        ROOT / "configs" / "gpt_tiny.yaml",
        (),
        oracle="megatron-core",
        layout=None,
        small=True,
        num_steps=1,
        dtype="float64",
    )
    name = "layers.11.attention.kv_norm_of_a_long_name.weight"
    one = Difference(0, "gradient", name, 1.23457e-05, 2.46913e-05, 1.5e-05, 2.00001)
    verdict = Verdict({"gradient": (1.5e-05, name)}, (one,), Cause(None, "a cause"))
    console = Console(file=StringIO(), width=width, highlight=False, soft_wrap=True)
    command.show_certificate(console, asked.trials[1], verdict, asked.against)
    assert isinstance(console.file, StringIO)
    out = console.file.getvalue()
    assert all(number in out for number in ("1.23457e-05", "2.46913e-05", "2.00001", "1.5e-05")) and "\u2026" not in out


def test_a_model_of_few_layers_has_stages_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    (asked,) = asked_of(monkeypatch, "gpt_tiny", "model.num_layers=2")
    layouts = [[stage.num_own for stage in stages_of(trial.config)] for trial in asked.trials]
    assert layouts == [[2], [1, 1], [2], [1, 1, 0, 0]]


def test_experts_are_cut_in_one_of_the_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    balance = "model.moe.balance={}"
    (asked,) = asked_of(monkeypatch, "mixtral_8x7b", balance)
    assert [trial.config.parallel.ep for trial in asked.trials] == [1, 1, 2, 2]


def asked_of(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> list[OracleTrial]:
    asked = oracle_says(monkeypatch, *[Verdict({"loss": (1e-16, "")}, (), None)] * 4)
    assert main(["verify", str(ROOT / "configs" / f"{name}.yaml"), "--oracle", "transformers", *words]) == 0
    return asked
