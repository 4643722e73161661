"""A run of configuration version 1 goes on under today's names. That version wrote tests/checkpoint/run_v1; nothing else may."""

import json
import shutil
from pathlib import Path

import pytest

from tests.launch.command_line import PRETRAIN, ended, records, started
from triaxis.engine.checkpoint.directory import find
from triaxis.engine.checkpoint.format.manifest import MANIFEST, parse_manifest, write_manifest
from triaxis.engine.checkpoint.resume_rules import changes
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.run_phases import run_phases
from triaxis.engine.errors import ConfigError
from triaxis.launch.reads.spans import spans_of
from triaxis.launch.report.record import read_run

GOLDEN = Path(__file__).resolve().parent / "run_v1"
TODAY = """
model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2, ffn_hidden_size: 16, vocab_size: 257, vocab_multiple: 1,
        seq_length: 32, tie_embeddings: true}
data: {train: [{path: data/prose, weight: 0.75}, {path: data/code, weight: 0.25}], split: [0.9, 0.1, 0.0]}
train: {global_batch_size: 4, micro_batch_size: 2}
eval: {interval: 2, steps: 1}
phases:
  - {name: first, until: 256}
  - {name: second, until: 512, data.train: data/code}
parallel: {tp: 1, pp: 1, dp: 1}
optimizer: {lr: 0.01, warmup_tokens: 128}
precision: {dtype: float64}
telemetry: {sample_tokens: 0}
runtime: {name: run}
"""
LOSSES = {3: 5.324523617205368, 4: 5.241450749186525}
"""What that version went on to from there, in float64."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run after its first phase, with its configuration as it was and as it is written today."""
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    (tmp_path / "today.yaml").write_text(TODAY)
    return tmp_path


def test_what_it_has_written_is_read_in_todays_names(folder: Path) -> None:
    run, today = folder / "runs" / "run", load_config(folder / "today.yaml")
    recorded = load_config(run / "config.yaml")
    for config in (recorded, today):
        assert [(phase.name, phase.end_step) for phase in run_phases(config)] == [("first", 2), ("second", 4)]
    assert (recorded.eval, recorded.phases, recorded.data.valid) == (today.eval, today.phases, today.data.valid)
    assert "stages" in json.loads((find(run).folder / MANIFEST).read_bytes())["config"], (
        "its manifest is of that version"
    )
    assert [one.key for one in changes(find(run).manifest.config, today) if one.verdict != "layout"] == []
    [span] = spans_of(read_run(run), recorded)
    assert [source.path for source in span.config.data.train] == ["data/prose", "data/code"]


def test_what_a_user_types_as_then_is_refused_with_todays_names(folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(folder / "old.yaml", ["train.stage=first"])
    said = str(refused.value)
    for old, new in (
        ("stages", "phases"),
        ("train.stage", "train.phase"),
        ("train.eval_interval", "eval.interval"),
        ("train.eval_steps", "eval.steps"),
        ("[0.75, 'data/prose']", "{path: data/prose, weight: 0.75}"),
    ):
        assert any(old in line and new in line for line in said.splitlines()), f"{old} -> {new}:\n{said}"


@pytest.mark.slow
def test_it_goes_on_to_the_bit(folder: Path) -> None:
    """Losses are those of that version; all state is that of a run whose manifest has today's names."""
    other = folder.with_name(f"{folder.name}_today")
    shutil.copytree(folder, other)
    saved = find(other / "runs" / "run").folder
    write_manifest(saved, parse_manifest(saved))
    assert b'"stages"' not in (saved / MANIFEST).read_bytes()
    for place in (folder, other):
        with started(place, *PRETRAIN, "today.yaml") as launcher:
            said = ended(launcher, 240.0)
        assert said.exit_code == 0, said.err
        assert "resuming after step 2" in said.out
    ours = records(folder / "runs" / "run" / "metrics.jsonl")
    assert {one["step"]: one["loss"] for one in ours if one["step"] > 2} == pytest.approx(LOSSES, rel=1e-12)
    first, second = (find(place / "runs" / "run").manifest for place in (folder, other))
    assert first.state.step == 4 and first.fingerprint == second.fingerprint
