"""A run directory that is removed or moved under a live run."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.launch.forked_ranks import work
from tests.launch.runs.test_run_directory import CONFIG
from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import TriaxisError
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.outlets.hub import Telemetry
from triaxis.engine.telemetry.outlets.metrics_log import MetricsLog
from triaxis.engine.telemetry.record.events import EventLog, read_events
from triaxis.engine.telemetry.record.jsonl import read_records
from triaxis.launch.rank.directory_watch import LOOK_SECONDS, DirectoryWatch

TINY = Path(__file__).resolve().parents[3] / "configs" / "gpt_tiny.yaml"


class Watched:
    """A run that is alive, with its files open and a clock that a test sets."""

    def __init__(self, runs: Path, *overrides: str) -> None:
        self.config = load_config(TINY, ["data.synthetic=true", "checkpoint.interval=2", *overrides])
        self.directory = RunDirectory.create(self.config, runs, "demo")
        self.directory.begin(self.config)
        self.metrics = MetricsLog(self.directory.metrics)
        self.telemetry = Telemetry(None, EventLog(self.directory.events(0), 0), [self.metrics])
        self.seconds = 0.0
        self.watch = DirectoryWatch(self.directory, self.telemetry, lambda: self.seconds)

    def look(self) -> None:
        self.seconds += LOOK_SECONDS
        self.watch.enter(StepPart.DATA)

    def kinds(self) -> list[str]:
        return [event.kind for event in read_events(self.directory.path).events]


def remove(path: Path) -> None:
    shutil.rmtree(path)


def move(path: Path) -> None:
    path.rename(path.with_name("old"))


def another_in_its_place(path: Path) -> None:
    move(path)
    path.mkdir()
    (path / "lock").touch()


@pytest.mark.parametrize("lose", [remove, move, another_in_its_place])
def test_a_lost_directory_is_made_again_and_said_once(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    run = Watched(tmp_path)
    path = run.directory.path
    run.look()
    assert run.kinds() == []
    lose(path)
    for _ in range(3):
        run.look()
    assert run.kinds() == ["directory_put_back"]
    assert load_config(path / "config.yaml") == run.config
    run.metrics.lines.write({"step": 7})
    assert read_records(path / "metrics.jsonl").records == [{"step": 7}]
    with pytest.raises(TriaxisError, match="another live run"):
        RunDirectory.create(run.config, tmp_path, "demo")
    run.directory.close()
    assert RunDirectory.create(run.config, tmp_path, "demo").attempt == 1


def test_checkpoints_that_are_lost_have_their_lock_again(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    shutil.rmtree(run.directory.path / "checkpoints")
    run.look()
    assert run.kinds() == ["directory_put_back"] and (run.directory.path / "checkpoints" / "lock").exists()


@pytest.mark.parametrize("attempts", [1, 2])
def test_checkpoints_elsewhere_are_still_known_to_be_there(tmp_path: Path, attempts: int) -> None:
    elsewhere = f"checkpoint.dir={tmp_path / 'disk'}"
    run = Watched(tmp_path, elsewhere)
    run.directory.mark_saved(tmp_path / "disk" / "step_00000002", 2)
    for _ in range(attempts - 1):
        run.directory.close()
        run = Watched(tmp_path, elsewhere)
    record = json.loads((run.directory.path / "saved").read_text())
    shutil.rmtree(run.directory.path)
    run.look()
    assert json.loads((run.directory.path / "saved").read_text()) == record


def test_checkpoints_that_were_removed_too_are_not_known(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    run.directory.mark_saved(run.directory.path / "checkpoints" / "step_00000002", 2)
    shutil.rmtree(run.directory.path)
    run.look()
    assert not run.directory.has_saved


def test_it_is_said_where_a_save_notices_it_first(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    shutil.rmtree(run.directory.path)
    run.directory.mark_saved(run.directory.path / "checkpoints" / "step_00000002", 2)
    for _ in range(2):
        run.look()
    assert run.kinds() == ["directory_put_back"] and run.directory.has_saved


def test_a_run_that_has_taken_the_place_keeps_it(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    move(run.directory.path)
    other = RunDirectory.create(run.config, tmp_path, "demo")
    with pytest.raises(TriaxisError, match="another live run"):
        run.look()
    with pytest.raises(TriaxisError, match="another live run"):
        run.directory.finish(steps=3)
    assert not (other.path / "finished").exists()
    other.close()


def test_a_place_that_cannot_be_made_is_tried_again(tmp_path: Path) -> None:
    run = Watched(tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").write_text("")
    run.look()
    run.look()
    (tmp_path / "runs").unlink()
    run.look()
    assert run.kinds() == ["directory_put_back"]


def test_a_look_is_rare(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    run.look()
    shutil.rmtree(run.directory.path)
    run.watch.enter(StepPart.DATA)
    assert not run.directory.path.exists()


def _rank(rank: int, words: Sequence[str]) -> tuple[int, str, str]:
    import triaxis.launch.rank.directory_watch
    from triaxis.engine.telemetry.outlets.notices import CheckpointNotices

    triaxis.launch.rank.directory_watch.LOOK_SECONDS = 0.0  # type: ignore[misc]
    saved = CheckpointNotices.on_saved

    def on_saved(self: CheckpointNotices, step: int, folder: Path, num_bytes: int, seconds: float) -> None:
        saved(self, step, folder, num_bytes, seconds)
        if rank == 0 and step == 2:
            # Another thread may write a file in between, which makes the folder not empty.
            for _ in range(100):
                shutil.rmtree(folder.parents[1], ignore_errors=True)

    CheckpointNotices.on_saved = on_saved  # type: ignore[method-assign]
    return work(rank, "triaxis.launch.pretrain_gpt", list(words))


@pytest.mark.distributed
def test_a_run_goes_on_where_its_directory_was_removed(tmp_path: Path) -> None:
    ended = run_ranks(_rank, 2, [*CONFIG, f"runtime.runs_dir={tmp_path}", "train.steps=6"])
    assert [code for code, *_ in ended] == [0, 0]
    run = tmp_path / "run"
    assert json.loads((run / "finished").read_text())["steps"] == 6
    assert (run / "checkpoints" / "latest").read_text() == "step_00000006\n" and (run / "saved").exists()
    assert [event.kind for event in read_events(run).events].count("directory_put_back") == 1
    assert read_records(run / "metrics.jsonl").records[-1]["step"] == 6
    assert isinstance(load_config(run / "config.yaml"), Config)
