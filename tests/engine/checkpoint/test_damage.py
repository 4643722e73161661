"""What disks, people and schedulers do to checkpoints: each a clear error, nothing else harmed, nothing half-written found."""

import errno
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.samples import commit
from tests.full_disk import room_for
from triaxis.engine.checkpoint.directory import CheckpointDirectory, find
from triaxis.engine.checkpoint.format.manifest import MANIFEST, MANIFEST_HASH, TrainingState
from triaxis.engine.checkpoint.format.store import write_file
from triaxis.engine.checkpoint.import_weights import read_tensor, whole, write_checkpoint
from triaxis.engine.errors import CheckpointError
from triaxis.launch.inspect.check import check_files

NOBODY = 65534
STATE = TrainingState.at_start()


def read_all(folder: Path) -> None:
    """Load every weight of a checkpoint."""
    candidate = find(folder)
    for name in candidate.manifest.tensors:
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            read_tensor(candidate.folder, candidate.manifest, name, kind)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with path.open("ab") as handle:
        handle.write(b"\0")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def clear(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_pipe(path: Path) -> None:
    """A reader that waits for its other end would wait forever."""
    path.unlink()
    os.mkfifo(path)


def make_huge(path: Path) -> None:
    """A reader of the whole file would run out of memory."""
    os.truncate(path, 2**40)


def put_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGE = (truncate, grow, flip, clear, delete, put_folder, put_dangling_link, put_pipe, make_huge)


@pytest.mark.parametrize("name", [MANIFEST, MANIFEST_HASH, "rank_00000.safetensors", "rank_00001.safetensors"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_older_checkpoint_is_whole(
    damage: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    directory = CheckpointDirectory(tmp_path)
    older, newer = commit(directory, 1), commit(directory, 2)
    damage(newer / name)
    with pytest.raises(CheckpointError) as raised:
        read_all(newer)
    assert str(newer) in str(raised.value)
    assert name in str(raised.value) or MANIFEST in str(raised.value)
    verified = check_files(newer, lambda num_bytes: None)
    assert any(name in problem for problem in verified.problems)
    read_all(older)
    assert check_files(older, lambda num_bytes: None).problems == ()


def test_a_pipe_in_the_place_of_a_file_does_not_hang_the_reader(tmp_path: Path) -> None:
    folder = commit(CheckpointDirectory(tmp_path), 1)
    put_pipe(folder / "rank_00000.safetensors")
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors: it is not a regular file"):
        read_all(folder)


def test_a_pipe_as_latest_does_not_hang_the_reader(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    commit(directory, 1)
    put_pipe(tmp_path / "latest")
    assert directory.latest() is None and find(tmp_path).manifest.state.step == 1


@pytest.mark.parametrize("at", range(0, 100, 7))
def test_a_flipped_bit_anywhere_is_seen_by_verify(at: int, tmp_path: Path) -> None:
    """In the header too, which our own reader does not need."""
    folder = commit(CheckpointDirectory(tmp_path), 1, ways=1)
    path = folder / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[at * (len(content) - 1) // 99] ^= 1
    path.write_bytes(content)
    assert check_files(folder, lambda num_bytes: None).problems


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder whose parents everybody may enter (pytest's own are closed to others)."""
    folder = Path(tempfile.mkdtemp(prefix="triaxis-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Permissions mean nothing to root: act as a user to whom they do."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", [MANIFEST, MANIFEST_HASH, "rank_00001.safetensors"])
def test_a_file_that_may_not_be_read(name: str, open_folder: Path) -> None:
    directory = CheckpointDirectory(open_folder)
    commit(directory, 1)
    folder = commit(directory, 2)
    (folder / name).chmod(0)
    with as_nobody():
        with pytest.raises(
            CheckpointError, match=rf"(?s)Permission denied.*{re.escape(name)}|{re.escape(name)}.*Permission denied"
        ):
            read_all(folder)
        read_all(directory.step_folder(1))
    (folder / name).chmod(0o644)


def test_a_folder_that_may_not_be_written(open_folder: Path) -> None:
    directory = CheckpointDirectory(open_folder)
    commit(directory, 1)
    before = sorted(path.name for path in open_folder.rglob("*"))
    open_folder.chmod(0o555)
    with as_nobody():
        with pytest.raises(PermissionError, match=r"Permission denied: .*step_00000000\.attempt_00"):
            write_checkpoint(open_folder, [whole("w", torch.ones(4))], STATE, config={}, source="x")
        read_all(open_folder)
    open_folder.chmod(0o755)
    assert sorted(path.name for path in open_folder.rglob("*")) == before


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """`folder` on a disk of this size; where that cannot be made (no root), files of this size at most."""
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
        == 0
    )
    if mounted:
        try:
            yield
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    with room_for(num_bytes // 2):
        yield


def test_a_full_disk_harms_nothing_that_is_there(tmp_path: Path) -> None:
    with small_disk(tmp_path, 2**18):
        directory = CheckpointDirectory(tmp_path)
        older = commit(directory, 1)
        with pytest.raises(OSError, match=r"part_00000\.safetensors") as raised:
            write_checkpoint(tmp_path, [whole("w", torch.ones(2**16))], STATE, config={}, source="x")
        assert raised.value.errno in (errno.ENOSPC, errno.EFBIG)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000001"]
        read_all(tmp_path)
        assert check_files(older, lambda num_bytes: None).problems == ()
        # With room again, the same call succeeds.
        assert write_checkpoint(tmp_path, [whole("w", torch.ones(2**4))], STATE, config={}, source="x").exists()


def test_a_file_that_may_not_grow_says_its_name(tmp_path: Path) -> None:
    with room_for(2**12), pytest.raises(OSError, match=r"File too large: .*rank_00000\.safetensors"):
        write_file(tmp_path / "rank_00000.safetensors", [whole("w", torch.ones(2**12))])


def test_a_checkpoint_that_is_copied_elsewhere_loads_there(tmp_path: Path) -> None:
    folder = commit(CheckpointDirectory(tmp_path / "a"), 3)
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "a")
    read_all(tmp_path / "copy")


def test_swapped_files_are_seen(tmp_path: Path) -> None:
    folder = commit(CheckpointDirectory(tmp_path), 1, ways=2)
    one, other = (folder / f"rank_0000{rank}.safetensors" for rank in (0, 1))
    one.rename(folder / "spare")
    other.rename(one)
    (folder / "spare").rename(other)
    with pytest.raises(CheckpointError, match="rank_0000"):
        read_all(folder)
