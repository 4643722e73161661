"""`triaxis data repeats` on the files of a run of two attempts, sound and with a repeat in it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.run_phases import reading_fields
from triaxis.engine.data.corpus.indexed import IndexedWriter
from triaxis.launch.cli import main

SKIPPED = [[4, 8]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 6 steps that went back after step 1, stopped after step 4, and was started again."""
    with IndexedWriter(str(tmp_path / "web"), "uint16") as writer:
        for length in np.random.default_rng(1).integers(1, 90, 60):
            writer.add_document(np.arange(length))
    tree = {
        "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 32, "vocab_size": 257},
        "data": {"train": str(tmp_path / "web"), "split": [1, 0, 0], "cache_dir": str(tmp_path / "cache")},
        "train": {"steps": 50, "global_batch_size": 4},
    }
    folder = tmp_path / "run"
    (folder / "events").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    steps = [(1, 0), (2, 0), (2, 0), (3, 0), (4, 0), (5, 0), (5, 1), (6, 1)]
    lines = [json.dumps({"step": step, "attempt": attempt, "loss": 1.0}) for step, attempt in steps]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    write_events(folder, SKIPPED)
    return folder


def write_events(folder: Path, skipped_at_resume: list[list[int]], **changed: Any) -> None:
    reads = reading_fields(load_config(folder / "config.yaml"))
    records = [
        {"attempt": 0, "kind": "begun", "step": 0, "reads": reads, "skipped": []},
        {"attempt": 0, "kind": "rolled_back", "step": 2, "to_step": 1, "skipped": SKIPPED},
        {"attempt": 1, "kind": "begun", "step": 4, "reads": {**reads, **changed}, "skipped": skipped_at_resume},
    ]
    lines = [json.dumps({"unix_time_seconds": float(time), **record}) for time, record in enumerate(records)]
    (folder / "events" / "node_00000.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_a_sound_run_has_read_nothing_twice(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "repeats", "--run", str(run)]) == 0
    out = capsys.readouterr().out
    assert "6 steps of 2 attempts, 24 samples" in out
    assert "steps repeated after a resume: 2" in out
    assert f"{24 * 32:,} of" in out and "128 of skipped samples" in out
    assert "nothing was read twice" in out


def test_a_repeat_is_named_with_its_document_and_steps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(run, [])
    assert main(["data", "repeats", "--run", str(run), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["repeats"]
    # Without the four samples that were left out, the fifth step reads those of the fourth again.
    assert {(one["earlier_step"], one["step"]) for one in found} == {(4, 5)}
    assert sum(one["length"] for one in found) == 4 * 32
    assert main(["data", "repeats", "--run", str(run)]) == 1
    assert "read twice: " in capsys.readouterr().out


def test_another_seed_on_the_way_repeats_and_leaves_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(run, SKIPPED, **{"train.seed": 7})
    assert main(["data", "repeats", "--run", str(run)]) == 1
    assert "epoch 0, document" in capsys.readouterr().out
