"""Tiny trainings on the sources of the standard library: what balance and FP8 do to what is learnt."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launch.command_line import ROOT, TRIAXIS
from triaxis.engine.config.load import load_config
from triaxis.launch import cli

ONE_RANK = (*(f"parallel.{axis}=1" for axis in ("tp", "pp", "vpp", "dp")), "parallel.sequence_parallel=false")
MANY_SAMPLES = "train.micro_batch_size=32"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "bytes"
    assert cli.main(["prepare", "--stdlib", "--output", str(prefix), "--tokenizer", "bytes"]) == 0
    return prefix


def trained(config: str, corpus: Path, folder: Path, *words: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run on one rank."""
    places = (f"data.train={corpus}", f"runtime.runs_dir={folder}", "runtime.name=run", "telemetry.log_interval=1")
    said = subprocess.run(
        [*TRIAXIS, "train", config, *ONE_RANK, MANY_SAMPLES, *places, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.distributed
def test_balance_evens_out_the_load(corpus: Path, tmp_path: Path) -> None:
    smaller = (
        *("model.hidden_size=64", "model.ffn_hidden_size=96", "model.seq_length=64", "train.global_batch_size=32"),
        *("train.steps=60", "optimizer.warmup_steps=10", "eval.interval=60", "eval.steps=1", "parallel.ep=1"),
    )
    off = ("model.moe.balance.bias_rate=0", "model.moe.balance.sequence_loss=0")
    runs = [
        trained("moe_tiny", corpus, tmp_path / name, *smaller, *words) for name, words in (("on", ()), ("off", off))
    ]
    balanced, unbalanced = (max(max(line["experts"]["load_max_over_mean"]) for line in run[-10:]) for run in runs)
    assert 1.0 < balanced < unbalanced


def test_both_tiny_configs_are_of_one_size() -> None:
    """What a comparison of the two rests on: the same data and training, and MLPs that are as wide for a token."""
    experts, dense = (load_config(ROOT / "configs" / f"{name}.yaml") for name in ("moe_tiny", "gpt_tiny"))
    moe = experts.model.moe
    assert moe is not None
    assert (moe.top_k + moe.shared_experts) * moe.ffn_hidden_size == dense.model.ffn_size == experts.model.ffn_size
    for section in ("train", "data", "optimizer", "precision"):
        assert getattr(experts, section) == getattr(dense, section)
    same = {"num_layers", "hidden_size", "num_attention_heads", "seq_length", "norm", "activation", "tie_embeddings"}
    assert all(getattr(experts.model, name) == getattr(dense.model, name) for name in same)


@pytest.mark.parametrize("fp8", ["{recipe: tensorwise, format: e4m3}", "{recipe: blockwise}", "{recipe: mxfp8}"])
def test_every_recipe_fits_the_tiny_model(fp8: str) -> None:
    assert load_config(ROOT / "configs" / "gpt_tiny.yaml", [*ONE_RANK, f"precision.fp8={fp8}"]).precision.fp8


@pytest.mark.slow
@pytest.mark.distributed
def test_fp8_learns_what_plain_learns(corpus: Path, tmp_path: Path) -> None:
    smaller = ("train.steps=20", "optimizer.warmup_steps=5", "eval.interval=20", "eval.steps=1")
    fp8 = ("precision.fp8.recipe=tensorwise",)
    runs = [
        trained("gpt_tiny", corpus, tmp_path / name, *smaller, *words) for name, words in (("no", ()), ("fp8", fp8))
    ]
    plain, rounded = (run[-1]["val_loss"] for run in runs)
    # Bytes begin at ln 257 = 5.55; two runs of other bits part by some hundredths.
    assert plain < 4 and rounded != plain
    assert rounded == pytest.approx(plain, abs=0.2)
