"""A run goes on with what its sequence loss has counted, also where the version that began it knew one form only."""

from pathlib import Path
from typing import Any

import pytest

from tests.launch.command_line import PRETRAIN, ended, records, started
from triaxis.engine.checkpoint.directory import find
from triaxis.engine.checkpoint.format.manifest import parse_manifest, write_manifest
from triaxis.engine.checkpoint.resume_rules import SEQUENCE_COUNTS, changes, with_kept_counts
from triaxis.engine.config.load import load_config
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config

RUN = """
model: {num_layers: 2, hidden_size: 16, num_attention_heads: 2, ffn_hidden_size: 16, vocab_size: 257, seq_length: 16, bias: none,
        layers: [dense, moe], moe: {num_experts: 8, top_k: 2, ffn_hidden_size: 8, score: sigmoid, groups: 4, top_groups: 2,
        balance: {bias_rate: 0.01, sequence_loss: 0.5}}}
data: {synthetic: true}
train: {steps: 4, global_batch_size: 4}
optimizer: {lr_schedule: constant}
precision: {dtype: float64}
checkpoint: {interval: 2}
telemetry: {sample_tokens: 0}
runtime: {name: run}
"""
CHOICES = f"{SEQUENCE_COUNTS}=choices"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return load_config(path)


def of_earlier(config: Config) -> dict[str, Any]:
    """The same as a version before wrote it."""
    tree = config.model_dump(mode="json")
    del tree["model"]["moe"]["balance"]["sequence_counts"]
    return tree


def counts(config: Config) -> str:
    assert config.model.moe is not None
    return config.model.moe.balance.sequence_counts


def test_what_was_counted_is_kept(config: Config) -> None:
    chosen = with_value(config, SEQUENCE_COUNTS, "choices")
    for there in (of_earlier(config), chosen.model_dump(mode="json")):
        kept = with_kept_counts(there, config)
        assert counts(kept) == "choices" and changes(there, kept) == []
        accepted = with_value(config, "checkpoint.accept", (SEQUENCE_COUNTS,))
        assert counts(with_kept_counts(there, accepted)) == "scores"
    assert counts(with_kept_counts(config.model_dump(mode="json"), config)) == "scores"


@pytest.mark.parametrize("field", ["bias_rate", "sequence_loss"])
def test_a_run_without_another_form_keeps_none(field: str, config: Config) -> None:
    """Without bias and groups, or without the loss, both forms are one."""
    plain = with_value(with_value(config, "model.moe.groups", 1), "model.moe.top_groups", 1)
    plain = with_value(plain, f"model.moe.balance.{field}", 0.0)
    assert with_kept_counts(of_earlier(plain), plain) == plain and changes(of_earlier(plain), plain) == []


@pytest.mark.slow
def test_an_earlier_run_goes_on_to_the_bit_and_says_so(config: Config, tmp_path: Path) -> None:
    def losses(place: Path, *words: str) -> tuple[dict[int, float], str]:
        place.mkdir(exist_ok=True)
        (place / "run.yaml").write_text(RUN)
        with started(place, *PRETRAIN, "run.yaml", *words) as launcher:
            said = ended(launcher, 240.0)
        assert said.exit_code == 0, said.err
        return {one["step"]: one["loss"] for one in records(place / "runs" / "run" / "metrics.jsonl")}, said.out

    straight, _ = losses(tmp_path / "straight", CHOICES)
    new, _ = losses(tmp_path / "new")
    losses(tmp_path / "cut", CHOICES, "train.steps=2")
    saved = find(tmp_path / "cut" / "runs" / "run").folder
    manifest = parse_manifest(saved)
    del manifest.config["model"]["moe"]["balance"]["sequence_counts"]
    write_manifest(saved, manifest)
    written = tmp_path / "cut" / "runs" / "run" / "config.yaml"
    written.write_text("".join(line for line in written.read_text().splitlines(True) if "sequence_counts" not in line))
    resumed, said = losses(tmp_path / "cut", "checkpoint.accept=[train.steps]")
    assert resumed == straight and resumed != new
    assert f"note: {SEQUENCE_COUNTS} stays choices" in said
