"""`triaxis data which` against the tokens that the loader of a run really reads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from triaxis.engine.config.load import load_config
from triaxis.engine.data.corpus.indexed import IndexedTokens, IndexedWriter
from triaxis.engine.data.datasets import open_datasets
from triaxis.engine.data.loader import Batches
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.launch.cli import main

SKIPPED = [[4, 8], [16, 20]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run over two corpora, which went back twice."""
    for number, name in enumerate(("web", "code")):
        lengths = np.random.default_rng(number).integers(1, 90, 200)
        with IndexedWriter(str(tmp_path / name), "uint16") as writer:
            for length in lengths:
                writer.add_document(np.random.default_rng(int(length)).integers(0, 256, length))
    tree = {
        "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 32, "vocab_size": 257},
        "data": {
            "train": [{"path": str(tmp_path / "web"), "weight": 0.7}, {"path": str(tmp_path / "code"), "weight": 0.3}],
            "split": [0.9, 0.1, 0.0],
            "cache_dir": str(tmp_path / "cache"),
        },
        "train": {"steps": 200, "global_batch_size": 4, "micro_batch_size": 2},
    }
    folder = tmp_path / "run"
    (folder / "events").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 7, "attempt": 2, "loss": 1.0}) + "\n")
    events: list[dict[str, Any]] = [
        {"unix_time_seconds": 1.0, "attempt": 0, "kind": "rolled_back", "step": 2, "skipped": SKIPPED[:1]},
        {"unix_time_seconds": 2.0, "attempt": 1, "kind": "rolled_back", "step": 5, "skipped": SKIPPED},
    ]
    (folder / "events" / "node_00000.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


@pytest.mark.parametrize("step", [1, 2, 7, 180])
def test_the_parts_hold_the_tokens_that_ranks_read(run: Path, step: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "which", "--run", str(run), "--step", str(step), "--json"]) == 0
    found = {one["sample_id"]: one for one in json.loads(capsys.readouterr().out)}
    config = load_config(run / "config.yaml")
    train = open_datasets(config.data, 32, config.train.seed, vocab_size=257).train
    read: dict[int, list[int]] = {}
    for dp_rank in range(2):
        batches = Batches(
            train,
            global_batch_size=4,
            micro_batch_size=1,
            dp=2,
            dp_rank=dp_rank,
            consumed_samples=4 * (step - 1),
            device="cpu",
            skipped=SkippedRanges.of(tuple(pair) for pair in SKIPPED),  # type: ignore[misc]
        )
        for microbatch in batches.next_step():
            (sample_id,) = microbatch.sample_ids
            read[sample_id] = [*microbatch.tokens[0].tolist(), int(microbatch.labels[0, -1])]
        batches.close()
    assert found.keys() == read.keys()
    assert [one["position"] for one in found.values()] == list(range(4 * (step - 1), 4 * step))
    for sample_id, one in found.items():
        corpus = IndexedTokens(one["corpus"])
        tokens = [
            corpus.tokens(part["document"], part["first"], part["first"] + part["length"]) for part in one["parts"]
        ]
        assert np.concatenate(tokens).tolist() == read[sample_id]
    assert any(one["epoch"] for one in found.values()) == (step == 180)


def test_people_see_documents_and_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "which", "--run", str(run), "--step", "7", "--text"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 7, made by attempt 3: 4 samples of 32 tokens")
    config = load_config(run / "config.yaml")
    sample = open_datasets(config.data, 32, config.train.seed, vocab_size=257).train[32]
    first = bytes(sample.tokens[: sample.lengths[0]].tolist()).decode(errors="replace")
    assert repr(first) in out, "the text of the step's first part"
    assert "sample 24 (id 32)  " in out and "  document " in out and out.count("    '") + out.count('    "') >= 4
    assert main(["data", "which", "--run", str(run), "--step", "8"]) == 0
    assert "step 8, not made yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step", "change", "said"),
    [
        ("0", {}, "--step 0: the run has the steps 1 to 200"),
        ("201", {}, "--step 201"),
        ("1", {"data": {"synthetic": True}}, "random tokens"),
        ("1", {"model": {}}, "config.yaml is not one of this version"),
    ],
)
def test_mistakes(run: Path, step: str, change: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    assert main(["data", "which", "--run", str(run), "--step", step]) == 2
    assert said in capsys.readouterr().err
