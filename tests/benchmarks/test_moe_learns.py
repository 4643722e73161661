"""The comparison of a mixture of experts with a dense model runs, and balance evens out the load of a tiny model."""

from pathlib import Path

import pytest

from tests.benchmarks.tiny_trainings import rows_of
from tests.launch.command_line import ROOT
from triaxis.engine.config.load import load_config

SMALLER = (
    *("model.hidden_size=64", "model.ffn_hidden_size=96", "model.seq_length=64", "train.global_batch_size=32"),
    *("train.steps=60", "optimizer.warmup_steps=10", "eval.interval=60", "eval.steps=1"),
)


@pytest.mark.slow
@pytest.mark.distributed
def test_balance_evens_out_the_load(tmp_path: Path) -> None:
    words = ["--only", "experts", "--only", "no balance", "--last-steps", "10"]
    rows = {row["name"]: row for row in rows_of("moe_learns", tmp_path, words, SMALLER)}
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
