"""What the launcher says before it starts ranks that would only say the same."""

import dataclasses
from pathlib import Path

import pytest

from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.indexed import IndexedWriter
from triaxis.engine.data.corpus.record import CorpusRecord, record_path
from triaxis.engine.device.gpus import Gpus
from triaxis.engine.errors import ConfigError, DataError, TopologyError, TriaxisError
from triaxis.engine.run.directory import RunDirectory
from triaxis.launch import cli
from triaxis.launch.start import launcher
from triaxis.launch.start.preflight import look_before_training, refuse_without_gpu

TINY = Path(__file__).resolve().parents[3] / "configs" / "gpt_tiny.yaml"


def config(tmp_path: Path, *overrides: str) -> Config:
    return load_config(TINY, [f"runtime.runs_dir={tmp_path / 'runs'}", "runtime.name=run", *overrides])


def test_a_missing_corpus_is_named_and_leaves_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        look_before_training(config(tmp_path, f"data.train={tmp_path / 'nowhere'}"), TINY)
    assert not (tmp_path / "runs").exists()
    llama = load_config(TINY.with_name("llama3_8b.yaml"), [f"runtime.runs_dir={tmp_path / 'runs'}"])
    with pytest.raises(DataError, match=r"--tokenizer llama3\.json --output data/corpus/llama3"):
        look_before_training(llama, TINY)


def test_a_corpus_of_another_tokenizer_starts_no_ranks(tmp_path: Path) -> None:
    prefix = str(tmp_path / "corpus")
    with IndexedWriter(prefix, "<u2") as writer:
        writer.add_document([1, 2])
    fields = dict.fromkeys((each.name for each in dataclasses.fields(CorpusRecord)), 1)
    words = {"tokenizer": "other.json", "tokenizer_identity": "0" * 64, "left_out": {}}
    record_path(prefix).write_text(CorpusRecord(**(fields | words)).to_json())  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"prepared with the tokenizer other\.json"):
        look_before_training(config(tmp_path, f"data.train={prefix}"), TINY)


def test_a_new_run_may_start(tmp_path: Path) -> None:
    assert look_before_training(config(tmp_path, "data.synthetic=true"), TINY) is None
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_says_so_and_another_config_is_refused(tmp_path: Path) -> None:
    synthetic = config(tmp_path, "data.synthetic=true")
    directory = RunDirectory.create(synthetic, synthetic.runtime.runs_dir, "run")
    directory.begin(synthetic)
    directory.metrics.write_text('{"step": 1}\n')
    assert look_before_training(synthetic, TINY) is None, "an unfinished run starts its next attempt"
    directory.finish(steps=240, loss=1.5, val_loss=None)
    directory.close()
    message = look_before_training(synthetic, TINY)
    assert message is not None
    assert "finished (steps 240, loss 1.5000)" in message
    with pytest.raises(TriaxisError, match=r"train\.seed: 1234 there, 5 here"):
        look_before_training(config(tmp_path, "data.synthetic=true", "train.seed=5"), TINY)


@pytest.mark.parametrize("flags", [[], ["--from-scratch"]])
def test_a_folder_that_cannot_be_written_starts_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    def no_ranks(*_: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launcher, "_run_torchrun", no_ranks)
    (tmp_path / "file").write_text("")
    for field, runs_dir in (("runtime.runs_dir", tmp_path / "file" / "runs"), ("checkpoint.dir", tmp_path / "runs")):
        words = ["data.synthetic=true", f"runtime.runs_dir={runs_dir}"]
        words += ["checkpoint.interval=5", f"checkpoint.dir={tmp_path / 'file' / 'saved'}"]
        assert cli.main(["train", str(TINY), *words, *flags]) == 2
        assert f"file is not a folder. Set {field} to a folder that this user can write" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_what_looks_at_a_gpu_is_refused_without_one(tmp_path: Path) -> None:
    asking = config(tmp_path, "telemetry.nvtx=true", "telemetry.memory_history=true")
    refuse_without_gpu(asking, has_gpu=True)
    refuse_without_gpu(config(tmp_path), has_gpu=False)
    with pytest.raises(ConfigError) as refused:
        refuse_without_gpu(asking, has_gpu=False, note="torch 2.13 is a CPU build")
    assert len(refused.value.problems) == 2
    assert "telemetry.nvtx = true" in str(refused.value) and "2.13 is a CPU build" in str(refused.value)
    assert "telemetry.memory_history = false" in str(refused.value)


def test_the_launcher_hands_its_decision_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = launcher.Request(TINY, ("data.synthetic=true", "runtime.collectives=gloo"), dry_run=True)
    for gpus, words in ((Gpus(8), "TRIAXIS_DEVICE=cuda"), (Gpus(0), "TRIAXIS_DEVICE=cpu")):
        monkeypatch.setattr(launcher, "find_gpus", lambda variables, gpus=gpus: gpus)
        assert launcher.launch(request, {}) == 0
        assert f"{words} TRIAXIS_BACKEND=gloo" in capsys.readouterr().out
    monkeypatch.setattr(launcher, "find_gpus", lambda variables: Gpus(0, problem="torch can use none of 8 GPUs"))
    with pytest.raises(TopologyError, match="torch can use none of 8 GPUs"):
        launcher.launch(request, {})


def test_the_launcher_refuses_it_before_a_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    request = launcher.Request(TINY, ("telemetry.nvtx=true", "data.synthetic=true"))
    monkeypatch.setattr(launcher, "find_gpus", lambda variables: Gpus(0, "there is a GPU, but torch is a CPU build"))
    with pytest.raises(ConfigError, match=r"telemetry\.nvtx = true.*a CPU build.*telemetry\.nvtx = false"):
        launcher.make_plan(request, {})
    monkeypatch.setattr(launcher, "find_gpus", lambda variables: Gpus(8))
    assert launcher.make_plan(request, {}).config.telemetry.nvtx
