"""The result of a run is kept: with the defaults its last step is saved, no summary fails it, and it can be made longer.

finished   2 steps of one rank; the schedule ends with the run; checkpoints in a folder of their own; the corpus has an id
           outside of the vocabulary, in a document that neither the start looks at nor the run reads
"""

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.harness import run_ranks
from tests.launch.command_line import records
from tests.launch.forked_ranks import work
from triaxis.engine.config.load import load_config
from triaxis.engine.data.corpus.indexed import IndexedWriter
from triaxis.engine.run.directory import RunDirectory
from triaxis.launch.cli import main

pytestmark = pytest.mark.distributed

CONFIG = """
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, ffn_hidden_size: 16, seq_length: 8, vocab_size: 257}
data: {train: corpus, split: [1, 0, 0]}
train: {global_batch_size: 2}
precision: {dtype: fp32}
runtime: {name: run}
checkpoint: {dir: saved}
"""
STRANGER = 300


def train(folder: Path, *words: str) -> str:
    """What rank 0 said in the log of the newest attempt."""
    [(code, _, err)] = run_ranks(_rank, 1, str(folder), words)
    assert code == 0, err
    return max(
        folder.glob("runs/*/logs/attempt_*/rank_00000.log"), key=lambda path: path.stat().st_mtime_ns
    ).read_text()


def _rank(rank: int, folder: str, words: tuple[str, ...]) -> tuple[int, str, str]:
    os.chdir(folder)
    return work(rank, "triaxis.launch.pretrain_gpt", ["small.yaml", *words])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the finished run, and its log."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "small.yaml").write_text(CONFIG)
    with IndexedWriter(folder / "corpus", np.int32) as writer:
        for document in range(3000):
            writer.add_document(np.full(100, STRANGER if document == 41 else document % 256))
    return folder, train(folder, "train.steps=2")


def test_the_last_step_is_saved_without_an_interval_and_no_summary_fails_it(finished: tuple[Path, str]) -> None:
    folder, log = finished
    assert [path.name for path in (folder / "saved").glob("step_*")] == ["step_00000002"]
    assert "saves       the last step and a stop, in saved/\n" in log and "in saved/step_00000002" in log
    assert "a part of the summary is missing: entropies need" in log and f"{STRANGER}" in log
    assert (folder / "runs" / "run" / "finished").exists()


def test_commands_follow_the_folder_that_the_run_saved_in(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished[0])
    for verb in ("inspect", "check", "fingerprint"):
        assert main(["checkpoint", verb, "runs/run"]) == 0
        assert "error" not in capsys.readouterr().err


def test_a_finished_run_goes_on_under_the_words_that_it_prints(
    finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps behind the first schedule follow the new one, on the weights, moments and samples of the first."""
    folder, _ = finished
    monkeypatch.chdir(folder)
    config = load_config("small.yaml", ["train.steps=2"])
    run = RunDirectory.look(config, config.runtime.runs_dir, "run")
    assert run is not None
    [printed] = re.findall(r"the same command with (.*) \(in place of its own\)", run.finished_message(config))
    log = train(folder, *shlex.split(printed))
    assert "resuming after step 2" in log
    assert "learning rate: falls from step 0 to 2 (cosine) there, from step 0 to 4 (cosine) here" in log
    assert "learning rate of the next step: 0 there, 0.00015 here" in log
    longer = records(folder / "runs" / "run" / "metrics.jsonl")
    assert [record["lr"] for record in longer] == pytest.approx([3e-4, 1.5e-4, 1.5e-4, 4.393398e-5], rel=1e-6)

    # The same rates until step 2, in one go: the weights of step 2 and the samples of step 3 give its loss.
    train(folder, "train.steps=4", "optimizer.decay_steps=2", "runtime.name=straight", "checkpoint.dir=other")
    straight = records(folder / "runs" / "straight" / "metrics.jsonl")
    assert [record["loss"] for record in longer[:3]] == [record["loss"] for record in straight[:3]]
    assert longer[3]["loss"] != straight[3]["loss"], "and its update follows the new schedule"
