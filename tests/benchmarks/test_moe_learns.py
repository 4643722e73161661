"""The comparison of a mixture of experts with a dense model runs, and balance evens out the load of a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config.load import load_config
from launch import cli
from tests.launch.command_line import ROOT

SMALLER = (
    *("model.hidden_size=64", "model.ffn_hidden_size=96", "model.seq_length=64", "train.global_batch_size=32"),
    *("train.steps=60", "optimizer.warmup_steps=10", "train.eval_interval=60", "train.eval_steps=1"),
)


def compare(folder: Path, *words: str) -> dict[str, dict[str, Any]]:
    """The rows of the benchmark by name, on the sources of the standard library."""
    prefix = folder / "bytes"
    assert cli.main(["prepare", "--stdlib", "--output", str(prefix), "--tokenizer", "bytes"]) == 0
    said = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.moe_learns", *words, "--json", str(folder / "learns.jsonl")),
            f"data.train=[[1.0, {prefix}]]",
            *SMALLER,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    return {row["name"]: row for row in json.loads((folder / "learns.jsonl").read_text())["rows"]}


@pytest.mark.slow
@pytest.mark.distributed
def test_balance_evens_out_the_load(tmp_path: Path) -> None:
    rows = compare(tmp_path, "--only", "experts", "--only", "no balance", "--last-steps", "10")
    balanced, unbalanced = (max(rows[name]["worst_loads"]) for name in ("experts", "no balance"))
    assert 1.0 < balanced < unbalanced
    assert rows["experts"]["active_parameters"] < rows["experts"]["parameters"]


def test_both_tiny_configs_are_of_one_size() -> None:
    """What the comparison rests on: the same data and training, and MLPs that are as wide for a token."""
    experts, dense = (load_config(ROOT / "configs" / f"{name}.yaml") for name in ("moe_tiny", "gpt_tiny"))
    moe = experts.model.moe
    assert moe is not None
    assert (moe.top_k + moe.shared_experts) * moe.ffn_hidden_size == dense.model.ffn_size == experts.model.ffn_size
    for section in ("train", "data", "optimizer", "precision"):
        assert getattr(experts, section) == getattr(dense, section)
    same = {"num_layers", "hidden_size", "num_attention_heads", "seq_length", "norm", "activation", "tie_embeddings"}
    assert all(getattr(experts.model, name) == getattr(dense.model, name) for name in same)
