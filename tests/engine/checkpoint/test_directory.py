"""The folder of checkpoints: which is loaded first, what is swept and kept, and that a kill anywhere leaves one to load."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.checkpoint.samples import bits, commit, model, training_shards, write_folder
from triaxis.engine.checkpoint.directory import Candidate, CheckpointDirectory, find, folders_at
from triaxis.engine.checkpoint.format.manifest import MANIFEST, TrainingState
from triaxis.engine.checkpoint.import_weights import read_tensor, whole, write_checkpoint
from triaxis.engine.errors import CheckpointError


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "run" / "checkpoints")


def names(directory: CheckpointDirectory) -> list[str]:
    return sorted(entry.name for entry in directory.path.iterdir())


def candidates(directory: CheckpointDirectory) -> list[Candidate]:
    """All of them; nothing may be damaged."""
    damaged: list[str] = []
    found = list(directory.candidates(damaged))
    assert damaged == []
    return found


def test_a_commit_leaves_the_checkpoint_and_latest(directory: CheckpointDirectory) -> None:
    folder = commit(directory, 900)
    commit(directory, 1000)
    assert names(directory) == ["latest", "step_00000900", "step_00001000"]
    assert (directory.path / "latest").read_text() == "step_00001000\n"
    assert folder == directory.step_folder(900)
    assert [candidate.manifest.state.step for candidate in candidates(directory)] == [1000, 900]


def test_what_is_being_written_is_no_candidate(directory: CheckpointDirectory) -> None:
    commit(directory, 1)
    write_folder(directory.partial(2, 0), training_shards(model()), step=2)
    assert [candidate.manifest.state.step for candidate in candidates(directory)] == [1]
    assert list(directory.steps()) == [1]


def test_order_is_latest_then_later_attempts_then_steps(directory: CheckpointDirectory) -> None:
    for step, attempt in ((10, 0), (40, 0), (20, 1), (30, 1), (20, 2)):
        commit(directory, step, attempt)
    (directory.path / "latest").write_text("step_00000010\n")
    order = [(candidate.manifest.attempt, candidate.manifest.state.step) for candidate in candidates(directory)]
    assert order == [(0, 10), (2, 20), (1, 30), (0, 40)]


@pytest.mark.parametrize(
    "content", [b"", b"../../etc\n", b"step_1\n", b"\xff\xff", b"step_00000001/..", b"step_00000001.attempt_00"]
)
def test_a_latest_that_names_nothing_is_passed_over(content: bytes, directory: CheckpointDirectory) -> None:
    commit(directory, 5)
    (directory.path / "latest").write_bytes(content)
    assert directory.latest() is None
    assert [candidate.manifest.state.step for candidate in candidates(directory)] == [5]


def test_a_latest_that_is_gone_is_told(directory: CheckpointDirectory) -> None:
    commit(directory, 5)
    (directory.path / "latest").write_text("step_00000006\n")
    damaged: list[str] = []
    assert [candidate.manifest.state.step for candidate in directory.candidates(damaged)] == [5]
    assert len(damaged) == 1
    assert "step_00000006 is not a complete checkpoint" in damaged[0]


def test_an_incomplete_folder_is_told_and_passed_over(directory: CheckpointDirectory) -> None:
    for step in (1, 2, 3):
        commit(directory, step)
    (directory.step_folder(3) / "rank_00001.safetensors").unlink()
    (directory.step_folder(1) / MANIFEST).unlink()
    damaged: list[str] = []
    assert [candidate.manifest.state.step for candidate in directory.candidates(damaged)] == [2]
    assert "rank_00001.safetensors: No such file or directory" in damaged[0]
    assert f"step_00000001 is not a complete checkpoint: No such file or directory ({MANIFEST})" in damaged[1]


def test_a_checkpoint_of_the_same_step_is_replaced(directory: CheckpointDirectory) -> None:
    commit(directory, 5, attempt=0, seed=0)
    commit(directory, 5, attempt=1, seed=1)
    assert names(directory) == ["latest", "step_00000005"]
    (candidate,) = candidates(directory)
    assert candidate.manifest.attempt == 1


def test_sweep_removes_what_the_dead_left(directory: CheckpointDirectory) -> None:
    commit(directory, 1)
    write_folder(directory.partial(2, 0), training_shards(model()), step=2)
    (directory.path / "latest.host-12.partial").write_text("step_0")
    (directory.path / "step_00000000.retired").mkdir()
    (directory.path / "notes.txt").write_text("mine")
    (directory.path / "step_00000003.backup").mkdir()
    assert directory.sweep() == ["latest.host-12.partial", "step_00000000.retired", "step_00000002.attempt_00"]
    assert names(directory) == ["latest", "notes.txt", "step_00000001", "step_00000003.backup"]


def test_a_link_is_removed_and_what_it_points_to_stays(directory: CheckpointDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("kept")
    commit(directory, 1)
    for name in ("step_00000002.attempt_00", "step_00000000.retired", "step_00000000"):
        (directory.path / name).symlink_to(elsewhere)
    assert directory.sweep() == ["step_00000000.retired", "step_00000002.attempt_00"]
    assert directory.retire(1, keep_last=1, keep_every=None) == ["step_00000000"]
    assert names(directory) == ["latest", "step_00000001"]
    assert (elsewhere / "mine").read_text() == "kept"


def test_sweep_gives_back_what_was_replaced_by_nothing(directory: CheckpointDirectory) -> None:
    folder = commit(directory, 1)
    folder.rename(folder.with_name("step_00000001.replaced"))
    assert [candidate.manifest.state.step for candidate in candidates(directory)] == [1]
    assert find(directory.path).manifest.state.step == 1
    assert directory.sweep() == []
    assert names(directory) == ["latest", "step_00000001"]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (None, None, [10, 20, 30, 40, 50]),
        (1, None, [50]),
        (2, None, [40, 50]),
        (9, None, [10, 20, 30, 40, 50]),
        (1, 20, [20, 40, 50]),
        (2, 30, [30, 40, 50]),
    ],
)
def test_retention(
    keep_last: int | None, keep_every: int | None, left: list[int], directory: CheckpointDirectory
) -> None:
    for step in (10, 20, 30, 40, 50):
        commit(directory, step)
    gone = directory.retire(50, keep_last, keep_every)
    assert list(directory.steps()) == left
    assert gone == [f"step_{step:08d}" for step in (10, 20, 30, 40, 50) if step not in left]
    assert directory.latest() == directory.step_folder(50)


def test_retention_never_removes_what_was_just_saved(directory: CheckpointDirectory) -> None:
    """An attempt that went back leaves higher steps behind: they are not newer."""
    for step, attempt in ((10, 0), (30, 0), (40, 0), (20, 1)):
        commit(directory, step, attempt)
    assert directory.retire(20, 1, None) == ["step_00000010"]
    assert list(directory.steps()) == [20, 30, 40]
    assert candidates(directory)[0].manifest.state.step == 20


def test_set_aside_moves_all_and_never_overwrites(directory: CheckpointDirectory) -> None:
    assert directory.set_aside() is None
    for number in range(2):
        commit(directory, 5)
        folder = directory.set_aside()
        assert folder == directory.path / f"set_aside_{number:02d}"
        assert find(folder).manifest.state.step == 5
        assert candidates(directory) == []
    (directory.path / "set_aside_00").rename(directory.path / "old")
    commit(directory, 5)
    assert directory.set_aside() == directory.path / "set_aside_02"


def test_find_and_folders_at_know_every_kind_of_path(directory: CheckpointDirectory, tmp_path: Path) -> None:
    for step in (1, 2):
        commit(directory, step)
    newest = directory.step_folder(2)
    for path in (directory.path, tmp_path / "run", newest, Path(f"{newest}/")):
        assert find(path).folder == newest
    assert find(directory.step_folder(1)).manifest.state.step == 1
    for path in (directory.path, tmp_path / "run"):
        assert folders_at(path) == [directory.step_folder(1), newest]
    assert folders_at(newest) == [newest]
    renamed = newest.rename(tmp_path / "my favourite")
    assert find(renamed).folder == renamed
    assert folders_at(renamed) == [renamed]


@pytest.mark.parametrize(
    "text", ["{}", "", "checkpoint: {dir: null}", "checkpoint: 3", "- 1", "checkpoint: {dir: [", "\0"]
)
def test_a_run_that_names_no_folder_has_its_own(text: str, directory: CheckpointDirectory) -> None:
    commit(directory, 1)
    (directory.path.parent / "config.yaml").write_text(text)
    assert find(directory.path.parent).folder == directory.step_folder(1)


def test_a_run_directory_leads_to_the_folder_that_its_config_names(
    directory: CheckpointDirectory, tmp_path: Path
) -> None:
    run, elsewhere = directory.path.parent, CheckpointDirectory(tmp_path / "disk" / "saved")
    commit(directory, 1)
    (run / "config.yaml").write_text(f"checkpoint:\n  dir: {elsewhere.path}\n")
    for looked_for in (find, folders_at):
        with pytest.raises(CheckpointError, match=f"nor in its checkpoint.dir = {elsewhere.path}"):
            looked_for(run)
    commit(elsewhere, 7)
    assert find(run).folder == elsewhere.step_folder(7)
    assert folders_at(run) == [elsewhere.step_folder(7)]


@pytest.mark.parametrize("looked_for", [find, folders_at])
def test_nothing_to_find_is_said(looked_for: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no such folder"):
        looked_for(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"contains no step_<number> folder"):
        looked_for(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"contains no step_<number> folder"):
        looked_for(tmp_path / "file")


def test_find_names_complete_ones_beside_a_damaged_or_missing_one(directory: CheckpointDirectory) -> None:
    commit(directory, 1)
    with pytest.raises(CheckpointError, match="No other one is complete"):
        (directory.step_folder(1) / MANIFEST).rename(directory.path / "kept")
        find(directory.path)
    (directory.path / "kept").rename(directory.step_folder(1) / MANIFEST)
    commit(directory, 2)
    (directory.step_folder(2) / MANIFEST).unlink()
    for path in (directory.step_folder(2), directory.step_folder(7)):
        with pytest.raises(CheckpointError, match=r"Complete checkpoints in the same folder: .*step_00000001"):
            find(path)
    with pytest.raises(CheckpointError, match=r"The newest complete one: .*step_00000001"):
        find(directory.path)


class Killed(BaseException):
    """The process is gone: no handler runs any system call after it."""


SYSTEM_CALLS = ("open", "rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "write")


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """Every system call that changes files raises from the given one on; yields the names of those that were made."""
    made: list[str] = []
    real = {name: getattr(os, name) for name in SYSTEM_CALLS}

    def dying(name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            if len(made) >= number:
                raise Killed
            made.append(name)
            return real[name](*args, **keywords)

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, dying(name))
    try:
        yield made
    except Killed:
        pass
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def kills(
    action: Callable[[CheckpointDirectory], object], prepare: Callable[[CheckpointDirectory], object], tmp_path: Path
) -> Iterator[CheckpointDirectory]:
    """A prepared directory for every point at which `action` can be killed."""
    for number in range(200):
        directory = CheckpointDirectory(tmp_path / f"kill_{number}")
        prepare(directory)
        with killed_at(number) as made:
            action(directory)
        yield directory
        if len(made) < number:
            assert number > 3, "nothing was patched"
            return
    raise AssertionError("the action never came to its end")


def loaded(directory: CheckpointDirectory) -> tuple[int, int]:
    """(step, seed) of the checkpoint that would be loaded first, read to its last byte; the same before and after a sweep."""
    answers = []
    for _ in range(2):
        candidate = candidates(directory)[0]
        assert candidate.folder == directory.latest(), "`latest` is there at every moment, and names a complete one"
        for name in model():
            for kind in ("exp_avg", "exp_avg_sq"):
                read_tensor(candidate.folder, candidate.manifest, name, kind)
        weights = {name: read_tensor(candidate.folder, candidate.manifest, name) for name in model()}
        seeds = [
            seed for seed in (0, 1) if all(bits(weights[name]) == bits(values) for name, values in model(seed).items())
        ]
        assert len(seeds) == 1
        answers.append((candidate.manifest.state.step, seeds[0]))
        directory.sweep()
    assert answers[0] == answers[1]
    assert not any("." in name for name in names(directory)), names(directory)
    return answers[0]


def test_a_kill_anywhere_in_a_commit(tmp_path: Path) -> None:
    def prepare(directory: CheckpointDirectory) -> None:
        commit(directory, 10, seed=0)
        write_folder(directory.partial(20, 0), training_shards(model(1)), step=20)

    seen = {loaded(directory) for directory in kills(lambda it: it.commit(it.partial(20, 0), 20), prepare, tmp_path)}
    assert seen == {(10, 0), (20, 1)}


def test_a_kill_anywhere_while_the_only_checkpoint_is_replaced(tmp_path: Path) -> None:
    def prepare(directory: CheckpointDirectory) -> None:
        commit(directory, 10, seed=0)
        write_folder(directory.partial(10, 1), training_shards(model(1)), step=10, attempt=1)

    seen = {loaded(directory) for directory in kills(lambda it: it.commit(it.partial(10, 1), 10), prepare, tmp_path)}
    assert seen == {(10, 0), (10, 1)}


def test_a_kill_anywhere_in_the_retention(tmp_path: Path) -> None:
    def prepare(directory: CheckpointDirectory) -> None:
        for step in (10, 20, 30):
            commit(directory, step)

    for directory in kills(lambda it: it.retire(30, 1, None), prepare, tmp_path):
        assert loaded(directory) == (30, 0)
        candidates(directory)  # what is still there is whole


def test_a_kill_anywhere_in_an_import(tmp_path: Path) -> None:
    def imported(directory: CheckpointDirectory, seed: int) -> Path:
        shards = [
            whole(name, values, kind)
            for kind in ("master", "exp_avg", "exp_avg_sq")
            for name, values in model(seed).items()
        ]
        return write_checkpoint(
            directory.path, shards, TrainingState.at_start(), config={}, source="test", has_moments=True
        )

    seen = {loaded(directory) for directory in kills(lambda it: imported(it, 1), lambda it: imported(it, 0), tmp_path)}
    assert seen == {(0, 0), (0, 1)}


def test_a_kill_while_checkpoints_are_set_aside_loses_none(tmp_path: Path) -> None:
    def prepare(directory: CheckpointDirectory) -> None:
        for step in (10, 20):
            commit(directory, step)

    for directory in kills(lambda it: it.set_aside(), prepare, tmp_path):
        aside = CheckpointDirectory(directory.path / "set_aside_00")
        # Half-way, the one `latest` that there is may name a step of the other folder.
        steps = [candidate.manifest.state.step for each in (directory, aside) for candidate in each.candidates([])]
        assert sorted(steps) == [10, 20]
