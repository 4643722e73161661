"""Run directories as crashes, full disks and people leave them: each start works or ends in words, and none waits."""

import contextlib
import errno
import json
import os
import re
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from triaxis.engine.checkpoint.lock import holding
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import StorageError, TriaxisError
from triaxis.engine.run import entries as run_entries
from triaxis.engine.run.directory import RunDirectory

MakeConfig = Callable[..., Config]
LONGEST_SECONDS = 20


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail where the block waits: opening a FIFO the ordinary way never returns."""

    def late(*_: object) -> None:
        raise AssertionError(f"still waiting after {LONGEST_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def trained(config: Config, runs: Path, name: str = "demo") -> RunDirectory:
    """A run that made a step and ended without finishing."""
    run = RunDirectory.create(config, runs, name)
    run.begin(config)
    run.metrics.write_text("{}\n")
    run.close()
    return run


BOMB = b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9 if i else [b"x"])) for i in range(12))
CONTENTS = {
    "nothing": b"",
    "torn": b'{"steps": 3, "lo',
    "binary": bytes(range(256)),
    "no object": b"[1, 2]",
    "other types": b'{"steps": "many", "model": 5}',
    "deep": b"[" * 100_000,
    "bomb": BOMB,
    "long number": b'{"steps": ' + b"9" * 5000 + b"}",
}


def place(path: Path, kind: str) -> None:
    """Put an entry of some kind where a run has, or may have, a file or a folder of its own."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(f"{path.name}.before"))
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "large":
        path.touch()
        os.truncate(path, 2**40)
    else:
        path.write_bytes(CONTENTS[kind])


ENTRIES = (
    *run_entries.FILES,
    *run_entries.FOLDERS,
    *("logs/attempt_old", "logs/attempt_7", "logs/attempt_99999999999999999999", "events/node_00000.jsonl"),
    *("checkpoints/lock", "checkpoints/latest", "checkpoints/skipped.json", "checkpoints/step_00000004"),
    *("checkpoints/step_00000006.attempt_01", "checkpoints/set_aside_00", "metrics.jsonl.partial"),
)
KINDS = (*CONTENTS, "folder", "FIFO", "link to itself", "link to a device", "large")


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    strange=st.dictionaries(st.sampled_from(ENTRIES), st.sampled_from(KINDS), min_size=1, max_size=4),
    from_scratch=st.booleans(),
)
@example(strange={"config.yaml": "other types"}, from_scratch=False)
@example(strange={"saved": "large"}, from_scratch=False)
@example(strange={"saved": "large"}, from_scratch=True)
def test_a_strange_entry_never_holds_a_start(
    make_config: MakeConfig,
    tmp_path_factory: pytest.TempPathFactory,
    strange: dict[str, str],
    from_scratch: bool,
) -> None:
    runs, config = tmp_path_factory.mktemp("runs"), make_config(checkpoint={"interval": 5})
    run = trained(config, runs)
    for name in sorted(strange, key=len, reverse=True):
        place(run.path / name, strange[name])
    with bounded():
        with contextlib.suppress(TriaxisError):
            RunDirectory.look(config, runs, "demo", from_scratch=from_scratch)
        try:
            again = RunDirectory.create(config, runs, "demo", from_scratch=from_scratch)
        except TriaxisError as refused:
            assert any(Path(name).parts[0] in str(refused) for name in strange), refused
            return
        assert again.known_wandb_id() is None or again.known_wandb_id().isprintable()  # type: ignore[union-attr]
        if again.finished is None:
            again.begin(config)
        again.close()


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("finished", "torn", "finished is damaged.*remove it"),
        ("finished", "no object", "finished is damaged: it holds no JSON object"),
        ("finished", "other types", "finished is damaged: steps = 'many' is not a whole number"),
        ("finished", "large", "File too large|has more than"),
        ("saved", "large", "has more than"),
        ("finished", "FIFO", "finished is a FIFO, and must be a regular file"),
        ("config.yaml", "binary", "config.yaml is damaged: it is not valid YAML.*RUN_NAME=demo-2"),
        ("config.yaml", "bomb", "config.yaml is damaged: .*more than 100,000 values"),
        ("config.yaml", "no object", "config.yaml is damaged: it holds no fields"),
        ("lock", "folder", "lock is a folder"),
        ("lock", "FIFO", "lock is a FIFO"),
        ("metrics.jsonl", "folder", "metrics.jsonl is a folder"),
        ("events", "nothing", "events is a regular file, and must be a folder"),
        ("events/node_00000.jsonl", "FIFO", "node_00000.jsonl is a FIFO"),
        ("checkpoints/lock", "FIFO", "lock is a FIFO"),
        ("checkpoints/latest", "folder", "latest is a folder"),
    ],
)
def test_it_is_said_which_entry_is_strange(
    make_config: MakeConfig, tmp_path: Path, name: str, kind: str, words: str
) -> None:
    config = make_config(checkpoint={"interval": 5})
    run = trained(config, tmp_path)
    place(run.path / name, kind)
    for open_it in (RunDirectory.look, RunDirectory.create):
        with bounded(), pytest.raises(TriaxisError, match=f"(?s){words}") as refused:
            open_it(config, tmp_path, "demo")
        assert refused.value.exit_code == 2


@pytest.mark.parametrize("name", ["logs/attempt_old", "logs/attempt_", "logs/attempt_-1", "logs/attempt_1e3"])
def test_an_entry_that_is_no_attempt_is_passed_over(make_config: MakeConfig, tmp_path: Path, name: str) -> None:
    run = trained(make_config(), tmp_path)
    (run.path / name).mkdir()
    assert trained(make_config(), tmp_path).attempt == 1


def test_a_file_with_an_attempts_name_is_not_overwritten(make_config: MakeConfig, tmp_path: Path) -> None:
    run = trained(make_config(), tmp_path)
    (run.path / "logs/attempt_01").write_text("mine")
    assert trained(make_config(), tmp_path).attempt == 2


def test_an_attempt_that_fails_before_it_begins_changes_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    config, other = make_config(), make_config(optimizer={"lr": 0.125}, checkpoint={"accept": ["optimizer"]})
    run = trained(config, tmp_path)
    run.checkpoints(config).step_folder(4).mkdir(parents=True)
    run.mark_saved(run.checkpoints(config).step_folder(4), 4)
    before = (run.path / "config.yaml").read_bytes()
    for from_scratch in (False, True):
        failed = RunDirectory.create(other, tmp_path, "demo", from_scratch=from_scratch)
        failed.close()
        assert (run.path / "config.yaml").read_bytes() == before
        assert run.has_saved and run.checkpoints(config).step_folder(4).exists()
    assert run.is_starting_over, "a restart of the same command starts over still"
    again = trained(config, tmp_path)
    assert again.attempt == 3 and not again.is_starting_over and again.set_aside is None


def test_the_folder_of_checkpoints_has_a_lock_wherever_it_is(make_config: MakeConfig, tmp_path: Path) -> None:
    saves = make_config(checkpoint={"interval": 5})
    alive = RunDirectory.create(saves, tmp_path, "one")
    folder = alive.checkpoints(saves).path
    with (
        pytest.raises(TriaxisError, match=r"another live run is writing to .*checkpoints, .*another folder"),
        holding(folder, "another folder"),
    ):
        pass
    alive.close()
    with (
        holding(folder, ""),
        pytest.raises(TriaxisError, match=r"another live run is writing to .*one/checkpoints, .*checkpoint\.dir"),
    ):
        RunDirectory.create(saves, tmp_path, "one")
    with holding(folder, ""), pytest.raises(TriaxisError, match="another live run"):
        # It saves nothing, and would sweep what the other one writes.
        RunDirectory.create(make_config(), tmp_path, "one")
    RunDirectory.create(saves, tmp_path, "one").close()


@pytest.mark.parametrize("inside", ["checkpoints", "", "checkpoints/step_00000005", "elsewhere/deep"])
def test_checkpoints_do_not_go_into_another_run(make_config: MakeConfig, tmp_path: Path, inside: str) -> None:
    one = trained(make_config(checkpoint={"interval": 5}), tmp_path / "runs", "one")
    (tmp_path / "link").symlink_to(one.path)
    for outer in (one.path, tmp_path / "link"):
        two = make_config(checkpoint={"interval": 5, "dir": str(outer / inside)})
        for open_it in (RunDirectory.look, RunDirectory.create):
            with pytest.raises(TriaxisError, match=r"directory of another run.*\s.*checkpoint\.load="):
                open_it(two, tmp_path / "runs", "two")
    assert sorted(path.name for path in (one.path / "checkpoints").iterdir()) == ["lock"]


def test_checkpoints_may_go_elsewhere_and_into_the_run_itself(make_config: MakeConfig, tmp_path: Path) -> None:
    for folder in ("runs/one/saved_here", "other_disk"):
        config = make_config(checkpoint={"interval": 5, "dir": str(tmp_path / folder)})
        trained(config, tmp_path / "runs", "one")
    config = make_config(checkpoint={"interval": 5, "dir": str(tmp_path / "runs/one")})
    with pytest.raises(TriaxisError, match="is the run directory itself"):
        RunDirectory.create(config, tmp_path / "runs", "one")


def unusable(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Folders in which nothing can be written, whoever asks, and the words that say why."""
    (tmp_path / "file").write_text("")
    return {
        "below a file": (tmp_path / "file" / "runs", f"{re.escape(str(tmp_path / 'file'))} is not a folder"),
        "a file": (tmp_path / "file", "file is not a folder"),
        "no place for files": (Path("/proc/self/runs"), "No such file|Permission denied|not permitted"),
    }


@pytest.mark.parametrize("case", ["below a file", "a file", "no place for files"])
def test_a_folder_that_cannot_be_written_is_said_in_words(make_config: MakeConfig, tmp_path: Path, case: str) -> None:
    folder, words = unusable(tmp_path)[case]
    config = make_config(checkpoint={"interval": 5})
    for open_it in (RunDirectory.look, RunDirectory.create):
        with pytest.raises(StorageError, match=rf"{words}.*runtime\.runs_dir") as refused:
            open_it(config, folder, "demo")
        assert refused.value.exit_code == 2
    config = make_config(checkpoint={"interval": 5, "dir": str(folder)})
    for open_it in (RunDirectory.look, RunDirectory.create):
        with pytest.raises(StorageError, match=rf"cannot be used for checkpoints: .*{words}.*checkpoint\.dir"):
            open_it(config, tmp_path / "runs", "demo")
    RunDirectory.create(make_config(), tmp_path / "runs", "demo").close()


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.parametrize("asked", ["look", "create"])
def test_a_run_of_another_user_is_said_in_words(make_config: MakeConfig, tmp_path: Path, asked: str) -> None:
    config = make_config()
    run = trained(config, tmp_path)
    for path in (tmp_path, *tmp_path.parents):
        if not path.stat().st_mode & stat.S_IXOTH:
            path.chmod(path.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing was raised"
        try:
            os.setgid(65534)
            os.setuid(65534)
            getattr(RunDirectory, asked)(config, tmp_path, run.path.name)
        except StorageError as error:
            said = f"{error.exit_code} {error}"
        except BaseException as error:
            said = repr(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    assert re.match(r"2 .*cannot be used for what this run writes: .*ermi.*runtime\.runs_dir", said), said


@pytest.mark.parametrize(("number", "code"), [(errno.EDQUOT, 1), (errno.ENOSPC, 1), (errno.EROFS, 2)])
def test_a_full_disk_may_go_better_at_the_next_start(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(StorageError, match=os.strerror(number)) as refused:
        RunDirectory.look(make_config(), tmp_path, "demo")
    assert refused.value.exit_code == code


def test_looking_leaves_nothing_behind(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(checkpoint={"interval": 5, "dir": str(tmp_path / "saved" / "here")})
    assert RunDirectory.look(config, tmp_path / "runs", "demo") is None
    assert list(tmp_path.iterdir()) == []


def test_an_id_of_a_page_that_is_no_text_is_none(make_config: MakeConfig, tmp_path: Path) -> None:
    run = trained(make_config(), tmp_path)
    run.wandb_id.write_bytes(b"\xff\xfe\x00")
    assert run.known_wandb_id() is None
    run.wandb_id.write_text("one line\nand another")
    assert run.known_wandb_id() is None
    run.wandb_id.write_text(json.dumps(5))
    assert run.known_wandb_id() == "5"
