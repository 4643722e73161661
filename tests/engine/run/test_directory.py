"""The run directory over the life of a run: first start, restarts, another config, a second start of a finished run."""

import errno
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import StorageError, TriaxisError
from triaxis.engine.run.directory import RunDirectory, run_name

MakeConfig = Callable[..., Config]


def start(config: Config, runs: Path, name: str = "demo", *, make_a_step: bool = True) -> RunDirectory:
    """One attempt that ends without finishing."""
    run = RunDirectory.create(config, runs, name)
    run.begin(config)
    if make_a_step:
        with run.metrics.open("a") as metrics:
            metrics.write("{}\n")
    run.close()
    return run


def test_the_name_is_given_or_the_stem_and_under_slurm_the_job(make_config: MakeConfig) -> None:
    config, named = make_config(), make_config(runtime={"name": "mine"})
    assert run_name(config, "gpt_tiny", {}) == "gpt_tiny"
    assert run_name(config, "gpt_tiny", {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2"}) == "gpt_tiny-77"
    assert run_name(named, "gpt_tiny", {"SLURM_JOB_ID": "77"}) == "mine"


def test_the_resolved_config_is_written_and_reads_back_equal(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        optimizer={"lr": 3.3e-5, "eps": 1e-8, "clip_grad": None},
        data={"train": [{"path": "a/b", "weight": 0.3}, {"path": "c", "weight": 0.7}]},
        telemetry={"wandb": {"project": "p", "tags": ["x"]}},
    )
    run = start(config, tmp_path)
    assert load_config(run.path / "config.yaml") == config


def test_attempts_count_up_and_each_has_its_logs(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    runs = [start(config, tmp_path) for _ in range(3)]
    assert [run.attempt for run in runs] == [0, 1, 2]
    assert runs[2].rank_log(3) == tmp_path / "demo/logs/attempt_02/rank_00003.log"
    assert RunDirectory.join(tmp_path, "demo", 2).rank_log(3) == runs[2].rank_log(3)


def test_another_config_is_refused_with_the_keys_that_differ(make_config: MakeConfig, tmp_path: Path) -> None:
    start(make_config(), tmp_path)
    other = make_config(optimizer={"lr": 0.125}, telemetry={"wandb": {"project": "p"}})
    with pytest.raises(TriaxisError) as caught:
        RunDirectory.create(other, tmp_path, "demo")
    message = str(caught.value)
    assert "optimizer.lr: 0.0003 there, 0.125 here" in message
    assert "checkpoint.accept=[optimizer.lr]" in message
    assert "telemetry" not in message, "where metrics go is no matter of what is trained"
    assert "RUN_NAME=demo-2" in message
    assert "hidden_size" not in message
    assert start(make_config(), tmp_path).attempt == 1, "a refused start leaves no attempt behind"


def test_many_differences_are_cut_short(make_config: MakeConfig, tmp_path: Path) -> None:
    start(make_config(), tmp_path)
    model: dict[str, Any] = dict.fromkeys(["num_layers", "hidden_size", "num_attention_heads", "seq_length"], 64)
    model |= {"vocab_size": 999, "norm": "rmsnorm", "bias": "none", "qk_norm": True, "activation": "swiglu"}
    model |= {"num_kv_heads": 1, "head_dim": 6, "ffn_hidden_size": 99, "tie_embeddings": False, "rope_base": 5.0}
    with pytest.raises(TriaxisError, match="and 1 more"):
        RunDirectory.create(make_config(model=model), tmp_path, "demo")


def test_another_layout_is_the_same_run(make_config: MakeConfig, tmp_path: Path) -> None:
    start(make_config(), tmp_path)
    other = make_config(
        parallel={"tp": 2, "dp": 2}, optimizer={"bucket_bytes": 4096}, recompute={"granularity": "full"}
    )
    run = start(other, tmp_path)
    assert run.attempt == 1
    assert load_config(run.path / "config.yaml") == other


def test_what_is_meant_is_accepted_by_name(make_config: MakeConfig, tmp_path: Path) -> None:
    start(make_config(), tmp_path)
    other = make_config(optimizer={"lr": 0.125}, checkpoint={"accept": ["optimizer"]})
    assert start(other, tmp_path).attempt == 1
    shape = make_config(train={"steps": 30, "global_batch_size": 16}, checkpoint={"accept": ["train"]})
    with pytest.raises(TriaxisError, match=r"may not change.*\n.*train.global_batch_size.*\n.*on its way as a phase"):
        RunDirectory.create(shape, tmp_path, "demo")


def test_a_finished_run_goes_on_for_more_steps_only_from_a_checkpoint(make_config: MakeConfig, tmp_path: Path) -> None:
    constant = {"lr_schedule": "constant"}
    run = start(make_config(optimizer=constant), tmp_path)
    run.finish(steps=30, loss=1.0)
    longer = make_config(optimizer=constant, train={"steps": 10_000, "global_batch_size": 8})
    again = RunDirectory.create(longer, tmp_path, "demo")
    assert again.finished is not None, "without a checkpoint it would begin at random weights"
    run.mark_saved(tmp_path / "step_00000300", 300)
    again = RunDirectory.create(longer, tmp_path, "demo")
    assert again.finished is None and again.has_saved
    assert (again.path / "finished").exists(), "the attempt may fail before it begins"
    again.begin(longer)
    assert not (again.path / "finished").exists()


@pytest.mark.parametrize(
    ("optimizer", "train", "words"),
    [
        ({}, {}, "train.steps=60 'checkpoint.accept=[data,train.steps]'"),
        ({}, {"steps": None, "tokens": 3840}, "train.tokens=7680 'checkpoint.accept=[data,train.tokens]'"),
        ({"decay_steps": 20}, {}, "train.steps=60 'checkpoint.accept=[data]'"),
    ],
)
def test_a_finished_run_names_the_words_that_lengthen_it(
    make_config: MakeConfig, tmp_path: Path, optimizer: dict[str, Any], train: dict[str, Any], words: str
) -> None:
    """Where the learning rate depends on the length, the change must be accepted."""
    rest = {"optimizer": optimizer, "checkpoint": {"accept": ["data"]}}
    train = {"steps": 30, "global_batch_size": 8, **train}
    run = start(make_config(train=train, **rest), tmp_path)
    run.mark_saved(tmp_path / "step_00000030", 30)
    run.finish(steps=30, loss=1.0)
    again = RunDirectory.look(make_config(train=train, **rest), tmp_path, "demo")
    assert again is not None
    assert f"the same command with {words} (in place of its own) goes on" in again.finished_message(
        make_config(train=train, **rest)
    )
    tree: dict[str, Any] = {}
    for word in shlex.split(words):
        (section, key), value = word.split("=")[0].split("."), yaml.safe_load(word.partition("=")[2])
        tree.setdefault(section, {})[key] = value
    longer = make_config(train=train | tree["train"], optimizer=optimizer, checkpoint=tree["checkpoint"])
    assert RunDirectory.look(longer, tmp_path, "demo") is None, "it starts"


def test_from_scratch_moves_checkpoints_aside(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    run = start(config, tmp_path)
    saved = run.checkpoints(config).step_folder(4)
    (saved / "inside").mkdir(parents=True)
    half = run.checkpoints(config).partial(6, 0)
    half.mkdir()
    run.mark_saved(saved, 4)
    run.finish(steps=1, loss=1.0)
    again = RunDirectory.create(config, tmp_path, "demo", from_scratch=True)
    assert again.finished is None and again.has_saved and saved.exists(), "nothing moves before it begins"
    again.begin(config)
    assert not again.has_saved and not again.is_starting_over and again.swept == [half.name]
    assert again.set_aside is not None and (again.set_aside / saved.name / "inside").is_dir()
    assert not saved.exists() and not half.exists()


def test_two_runs_cannot_share_a_folder_of_checkpoints(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(checkpoint={"interval": 5, "dir": str(tmp_path / "shared")})
    alive = RunDirectory.create(config, tmp_path, "one")
    with pytest.raises(TriaxisError, match="another live run"):
        RunDirectory.create(config, tmp_path, "two")
    alive.close()
    RunDirectory.create(config, tmp_path, "two").close()


def test_a_moved_folder_is_the_same_run(make_config: MakeConfig, tmp_path: Path) -> None:
    start(make_config(runtime={"name": "demo", "runs_dir": "elsewhere"}), tmp_path)
    assert start(make_config(runtime={"name": "demo", "runs_dir": str(tmp_path)}), tmp_path).attempt == 1


def test_an_attempt_without_a_step_may_be_corrected(make_config: MakeConfig, tmp_path: Path) -> None:
    start(make_config(), tmp_path, make_a_step=False)
    corrected = make_config(optimizer={"lr": 0.125})
    run = start(corrected, tmp_path)
    assert run.attempt == 1
    assert load_config(run.path / "config.yaml") == corrected


def test_a_finished_run_says_so_and_is_left_alone(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    run = start(config, tmp_path)
    run.finish(steps=300, loss=1.23456, val_loss=None)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}

    again = RunDirectory.create(config, tmp_path, "demo")
    assert again.finished == {"steps": 300, "loss": 1.23456, "val_loss": None}
    assert again.attempt == 0
    message = again.finished_message(config)
    assert "finished (steps 300, loss 1.2346)" in message and "longer       nothing was saved" in message
    assert str(run.path) in message and "RUN_NAME=demo-2" in message
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before

    (tmp_path / "demo-2").mkdir()
    assert "RUN_NAME=demo-3" in again.finished_message(config)


def test_two_runs_that_are_alive_do_not_share_a_directory(make_config: MakeConfig, tmp_path: Path) -> None:
    alive = RunDirectory.create(make_config(), tmp_path, "demo")
    with pytest.raises(TriaxisError, match="another live run"):
        RunDirectory.create(make_config(), tmp_path, "demo")
    alive.close()
    assert start(make_config(), tmp_path).attempt == 1


@pytest.mark.parametrize(("number", "starts"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_a_file_system_without_locks_still_trains(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, starts: bool
) -> None:
    def no_lock(*_: object) -> None:
        raise OSError(number, "no lock")

    monkeypatch.setattr("fcntl.flock", no_lock)
    if starts:
        assert start(make_config(), tmp_path).attempt == 0
    else:
        with pytest.raises(StorageError, match="no lock"):
            start(make_config(), tmp_path)


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp/x", "a\0b", "a\nb"])
def test_a_name_is_one_folder(make_config: MakeConfig, tmp_path: Path, name: str) -> None:
    for open_it in (RunDirectory.create, RunDirectory.look):
        with pytest.raises(TriaxisError, match=r"^runtime\.name = "):
            open_it(make_config(), tmp_path, name)
    with pytest.raises(TriaxisError, match=r"^runtime\.name = "):
        RunDirectory.join(tmp_path, name, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_run_does_not_write_through_links_to_other_places(make_config: MakeConfig, tmp_path: Path) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    runs.mkdir()
    elsewhere.mkdir()
    (runs / "demo").symlink_to(elsewhere)
    with pytest.raises(TriaxisError, match="is a link to"):
        start(make_config(), runs)
    (runs / "demo").unlink()
    for name in ("checkpoints", "metrics.jsonl", "logs", "lock"):
        (runs / "demo").mkdir(exist_ok=True)
        (runs / "demo" / name).symlink_to(elsewhere / name)
        with pytest.raises(TriaxisError, match=f"lead out of the run directory: .*{name} -> "):
            start(make_config(), runs)
        (runs / "demo" / name).unlink()
    assert list(elsewhere.iterdir()) == []
    (tmp_path / "other_disk").symlink_to(runs)  # where runs stand is the configuration's to say, and it may be a link
    (runs / "demo" / "notes").mkdir()
    (runs / "demo" / "newest_notes").symlink_to("notes")
    assert start(make_config(), tmp_path / "other_disk").attempt == 0
