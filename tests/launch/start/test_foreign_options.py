"""Options of other engines: each is answered with our words and a command that works as it is printed."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from triaxis.engine.config.load import as_overrides
from triaxis.engine.config.names.foreign_names import FOREIGN_VALUES, our_name
from triaxis.launch.cli import main
from triaxis.launch.start.foreign_options import SCRIPT
from triaxis.models.interop.megatron.command_line.convert import from_command_line

TINY = "configs/gpt_tiny.yaml"
MEGATRON = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 100 --mock-data --bf16 --vocab-size 300"
)


@pytest.fixture(autouse=True)
def triaxis_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def answered(capsys: pytest.CaptureFixture[str], *words: str, command: str = "train") -> str:
    assert main([command, *words]) == 2
    return capsys.readouterr().err


def pasted(err: str) -> list[str]:
    """Return the words of the one command that is printed, without the program."""
    (line,) = [line.strip() for line in err.splitlines() if line.strip().startswith(("triaxis train", "bash "))]
    return shlex.split(line.removeprefix("triaxis ").removeprefix("bash launch/pretrain_gpt.sh"))


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("--tensor-model-parallel-size 2", "parallel.tp=2"),
        ("--tp 4", "parallel.tp=4"),
        ("--pp=4", "parallel.pp=4 parallel.vpp=1"),
        ("--dp 1", "parallel.dp=1"),
        ("--train-iters 10", "train.steps=10 optimizer.warmup_steps=10"),
        ("--train.steps 10", "train.steps=10 optimizer.warmup_steps=10"),
        ("--steps 30", "train.steps=30"),
        ("--max_steps 30", "train.steps=30"),
        ("--training.seq_len 64", "model.seq_length=64"),
        ("--parallelism.tensor_parallel_degree 2", "parallel.tp=2"),
        ("--micro-batch-size 2 --lr 1e-3", "train.micro_batch_size=2 optimizer.lr=1e-3"),
        ("--seq-length 64", "model.seq_length=64"),
        ("--bf16", "precision.dtype=bf16"),
        ("--dtype BF16", "precision.dtype=bf16"),
        ("--dtype fp8", "precision.dtype=bf16 precision.fp8.recipe=tensorwise"),
        ("--normalization LayerNorm", "model.norm=layernorm"),
        ("--sequence-parallel", "parallel.sequence_parallel=true"),
        ("--data-path mine_text_document", "data.train=mine_text_document"),
        ("--wandb-project mine", "telemetry.wandb.project=mine"),
        ("--overlap-grad-reduce --tp 2", "parallel.tp=2"),
    ],
)
def test_the_command_that_is_printed_works(
    typed: str, ours: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = pasted(answered(capsys, *typed.split(), TINY, "--dry-run", "train.seed=3"))
    assert words == ["train", *shlex.split(ours), TINY, "--dry-run", "train.seed=3"]
    assert main(words) == 0


def test_a_script_is_named_as_it_was_typed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCRIPT, "launch/pretrain_gpt.sh")
    monkeypatch.setenv("DP", "1")
    err = answered(capsys, "--pp", "4")
    assert "1. --pp 4 is not an option here; use parallel.pp=4:\n" in err
    # What was said in the environment is said again.
    assert "\n       DP=1 bash launch/pretrain_gpt.sh parallel.pp=4 parallel.vpp=1\n" in err
    assert "\n     With parallel.vpp=1: model.num_layers = 4 must be at least pp x vpp" in err
    # Other commands have no script.
    assert "\n       DP=1 triaxis footprint parallel.tp=2" in answered(capsys, "--tp", "2", TINY, command="footprint")


def test_what_has_no_single_word_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    err = answered(capsys, "--num-layers-per-virtual-pipeline-stage", "2", "--bf16", "--tp", "2", "--nosuch", "3")
    assert "1. --bf16, --tp 2 are not options here; use precision.dtype=bf16 parallel.tp=2.\n" in err
    assert "is not an option here; use parallel.vpp (a number of chunks, not of layers)." in err
    assert "unknown option --nosuch; an override reads" in err
    # Two of them are Megatron-LM's, so there may be a script.
    assert err.rstrip().endswith("a whole Megatron-LM command line or script to a config.")
    assert "\n     triaxis" not in err and "bash" not in err, "nothing to paste works"
    assert "Write telemetry.wandb.project=NAME" in answered(capsys, "--wandb")
    assert "Nearest legal: parallel.tp = 2 or 4." in answered(capsys, "--tp", "3", TINY)


def test_a_whole_line_of_megatron_becomes_a_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    err = answered(capsys, *MEGATRON.split(), "runtime.device=cpu", "--dry-run")
    first, second = [line.strip() for line in err.splitlines() if line.startswith("       triaxis")]
    words = shlex.split(first)
    assert words[:3] == ["triaxis", "new", "--from"] and words[4:] == [">", "megatron.yaml"]
    monkeypatch.chdir(tmp_path)
    Path("megatron.yaml").write_text(from_command_line(words[3:4]))
    assert second == "triaxis train megatron.yaml runtime.device=cpu --dry-run"
    assert main(shlex.split(second)[1:]) == 0
    # What that command would refuse is told at once.
    err = answered(capsys, *MEGATRON.replace("--bf16", "--use-mup").split())
    assert "will report the following" in err and "muP is a recipe of fields" in err


def test_values_of_others_are_values_of_ours() -> None:
    for field, values in FOREIGN_VALUES.items():
        if field != "recompute.modules":
            for theirs in values:
                assert theirs == theirs.lower() and as_overrides(field, theirs), (field, theirs)
    assert (
        as_overrides("parallel.tp", "true")
        == as_overrides("parallel.tp", "x")
        == as_overrides("telemetry.wandb", "x")
        == []
    )


def test_a_name_with_several_meanings_has_none() -> None:
    assert our_name("name") is None and our_name("nosuch") is None
    assert our_name("steps") == "train.steps", "not those of a validation"
