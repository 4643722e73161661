"""Keeps a rank's current activity in shared memory, where other processes can read it.

    executor, training loop, ledger  ->  Heartbeat  ->  320 bytes in /dev/shm  ->  any process of the node, at any time

A beat is a few stores into mapped memory, with no system call, clock or lock. A reader only checks whether anything has changed, so
a half-finished write does no harm.

The file is written once before it is mapped. If /dev/shm is full, this write fails, and the rank uses the folder for temporary
files. A store into a page without memory would end the process with SIGBUS.

    index of int64   0 layout  1 rank  2 pid  3 attempt  4 beats  5 step  6 position  7 peer  8 begun  9 started
                     10 building  11 built
    byte of text     128.. part   160.. op   192.. axis   224.. purpose, each padded with zeros

`Beat` describes the fields.
"""

import errno
import hashlib
import mmap
import os
import stat
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from triaxis.engine.comm.ledger import NO_PEER, Event
from triaxis.engine.errors import NoRoomError, TriaxisError
from triaxis.engine.pipeline.actions import Action
from triaxis.engine.pipeline.lowering import Instruction
from triaxis.engine.run.step_parts import FIRST, StepPart, StepWatcher
from triaxis.engine.storage.state_files import read_regular

LAYOUT = 0x0154_5249_4158_0002
"""First word in the file: a magic number, and the version of the words' layout."""

SIZE = 320
_WORDS = (
    *("layout", "rank", "pid", "attempt", "beats", "step", "position", "peer", "begun", "started"),
    *("building", "built"),
)
_BEATS, _STEP, _POSITION, _PEER, _BEGUN = map(_WORDS.index, ("beats", "step", "position", "peer", "begun"))
_BUILDING, _BUILT = map(_WORDS.index, ("building", "built"))
_TEXTS = {"part": 128, "op": 160, "axis": 192, "purpose": 224}
_TEXT_BYTES = {"part": 32, "op": 32, "axis": 32, "purpose": 96}


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's activity at one moment.

    Attributes:
        beats: number of activity changes; if it is equal at two moments, the rank has not moved.
        step: step, counted from 1; 0 before the first.
        part: part of the training loop; "" before the first.
        position: the running action's number in the rank's schedule, from 1; 0 if no action runs. Communication has no number.
        op, axis, purpose: labels of the call that the rank waits for; "" if it waits for no call.
        peer: index, on `axis`, of the rank that this rank sends to or receives from; NO_PEER for a collective.
        begun: number of steps that this process has begun.
        started: start time of this process, in milliseconds since the epoch; together with `pid` it identifies the process.
        building: 1 while the rank's loader builds an epoch's sample order, or waits for another process on the node to build it.
        built: number of progress reports on sample orders: one per finished piece or hashed block.
    """

    rank: int
    pid: int
    attempt: int
    beats: int
    step: int
    part: str
    position: int
    op: str
    axis: str
    purpose: str
    peer: int
    begun: int
    started: int
    building: int = 0
    built: int = 0

    def is_still(self, later: "Beat") -> bool:
        """Whether the rank has not moved between this beat and a later one."""
        return (self.beats, self.built) == (later.beats, later.built)


def folders_of(run: Path) -> list[Path]:
    """List the folders in which a run's ranks on this node may keep their heartbeats.

    The preferred folder comes first. All ranks on a node get the same folders.
    """
    places = [place for place in [Path("/dev/shm")] if place.is_dir()]
    with suppress(OSError):  # no folder for temporary files is writable
        places.append(Path(tempfile.gettempdir()))
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    return [place / f"triaxis-{os.getuid()}-{name}" for place in places]


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}"


def _is_ours(folder: Path) -> bool:
    """Whether the path is this user's directory, to which no other user may write."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _must_be_ours(folder: Path) -> None:
    """Refuse a folder that another user could change.

    Raises:
        TriaxisError: the path is a link, or another user owns it or may write to it.
    """
    if _is_ours(folder):
        return
    found = folder.lstat()
    raise TriaxisError(
        f"{folder} is a link, or another user owns it or may write to it (owner {found.st_uid}, mode {found.st_mode:o}). "
        "Ranks keep their heartbeats there, and a user who can change them decides what a hang report says and which "
        "processes it ends. Remove it, and start again."
    )


class Heartbeat(StepWatcher):
    """This rank's heartbeat, which follows its steps and its waits (`triaxis.engine.comm.ledger.WaitObserver`).

    Args:
        folders: candidate folders, from `folders_of`; the file is in the first one that has room. This rank's files from earlier
            attempts are removed.

    Attributes:
        path: heartbeat file.
        passed_over: why the folders before the chosen one could not be used, one phrase each.

    Raises:
        NoRoomError: the file could not be created in any folder.
        TriaxisError: another user owns a folder or may write to it.
    """

    def __init__(self, folders: Sequence[Path], rank: int, attempt: int) -> None:
        pid = os.getpid()
        self._folders, self._rank = tuple(folders), rank
        self.passed_over: tuple[str, ...] = ()
        self._unlink(rank)  # and keep the folders: another rank may have just created one, and has no file in it yet
        for folder in folders:
            try:
                self._map = _mapped(folder, rank)
            except OSError as error:
                self.passed_over += (f"{folder}: {error.strerror or error}",)
                continue
            self.path = file_of(folder, rank)
            break
        else:
            tried = "; ".join(self.passed_over)
            raise NoRoomError(
                f"no folder takes the {SIZE} bytes of this rank's heartbeat: {tried}. When the run hangs, no report could say what "
                "the rank was doing. Make room in one of them, or set TMPDIR to a folder that has some."
            )
        self._words = memoryview(self._map)[: 8 * len(_WORDS)].cast("q")
        for place, value in enumerate((LAYOUT, rank, pid, attempt, 0, 0, 0, NO_PEER, 0, started_at(pid), 0, 0)):
            self._words[place] = value
        self._texts: dict[tuple[str, str], bytes] = {}
        self._num_actions = 0

    def enter(self, part: StepPart) -> None:
        """Record that the loop enters `part`. The first part also begins a step."""
        if part == FIRST:
            self._words[_STEP] += 1
            self._words[_BEGUN] += 1
        self._words[_POSITION] = 0
        self._write("part", part)
        self._words[_BEATS] += 1

    def begin(self, steps_made: int) -> None:
        """Set the number of completed steps to `steps_made`."""
        self._words[_STEP] = steps_made

    def instruction(self, instruction: Instruction | None) -> None:
        """Record that the executor begins `instruction`, and count actions. `instruction` is None after the last one."""
        if isinstance(instruction, Action):
            self._num_actions += 1
        elif instruction is None:
            self._num_actions = 0
        self._words[_POSITION] = self._num_actions if isinstance(instruction, Action) else 0
        self._words[_BEATS] += 1

    def under_way(self, posted: Event, handles: Sequence[Any]) -> None:
        """Do nothing: a rank hangs while it waits for a call, not when it posts one."""

    def wait_begins(self, posted: Event) -> None:
        """Record the call that the rank waits for."""
        self._words[_PEER] = posted.peer
        self._write("axis", posted.axis)
        self._write("purpose", posted.purpose)
        self._write("op", posted.op)
        self._words[_BEATS] += 1

    def wait_ends(self) -> None:
        """Clear the recorded call, so that the beat shows no wait."""
        self._write("op", "")
        self._words[_BEATS] += 1

    def builds(self) -> None:
        """Count progress on an epoch's sample order: one more piece built, or one more block of its file hashed."""
        self._words[_BUILDING] = 1
        self._words[_BUILT] += 1

    def has_built(self) -> None:
        """Record that work on an epoch's sample order has ended, with or without success."""
        self._words[_BUILDING] = 0

    def read_begins(self, mark: Event) -> None:
        """Do nothing: the beat shows communication calls only, not the host's reads of device values."""

    def read_ends(self) -> None:
        """Do nothing: the beat does not show the host's reads of device values."""

    def read(self) -> Beat:
        """Read this rank's own beat, as another process would."""
        return _parse(self._map[:])

    def of_rank(self, rank: int, attempt: int) -> Beat | None:
        """Read the heartbeat of a rank on this node. None if the rank has no heartbeat from this attempt."""
        beats = [read_beat(file_of(folder, rank)) for folder in self._folders if _is_ours(folder)]
        return next((beat for beat in beats if beat is not None and beat.attempt == attempt), None)

    def remove(self, rank: int) -> None:
        """Remove the file of an ended rank on this node, and any empty folders."""
        self._unlink(rank)
        for folder in filter(_is_ours, self._folders):
            with suppress(OSError):
                folder.rmdir()  # only the node's last rank can

    def close(self) -> None:
        """Remove this rank's file; may be called twice."""
        self.remove(self._rank)

    def _unlink(self, rank: int) -> None:
        for folder in filter(_is_ours, self._folders):
            with suppress(OSError):
                file_of(folder, rank).unlink(missing_ok=True)

    def _write(self, what: str, text: str) -> None:
        content = self._texts.get((what, text))
        if content is None:
            size = _TEXT_BYTES[what]
            content = self._texts[what, text] = text.encode()[: size - 1].ljust(size, b"\0")
        start = _TEXTS[what]
        self._map[start : start + len(content)] = content


def _mapped(folder: Path, rank: int) -> mmap.mmap:
    """Create and map a rank's file in a folder, with room for all its bytes.

    Raises:
        OSError: the folder cannot be written, or there is no room; no file is left in it.
        TriaxisError: another user owns the folder or may write to it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    _must_be_ours(folder)
    path = file_of(folder, rank)
    try:
        with path.open("x+b", buffering=0) as file:
            written = file.write(bytes(SIZE))
            if written != SIZE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return mmap.mmap(file.fileno(), SIZE)
    except OSError:
        path.unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()
        raise


def read_beat(path: Path) -> Beat | None:
    """Read a heartbeat file on this node. None if the file is missing or in another version's format."""
    try:
        content = read_regular(path, SIZE)
    except OSError:
        return None
    if len(content) != SIZE or struct.unpack_from("q", content)[0] != LAYOUT:
        return None
    return _parse(content)


def started_at(pid: int) -> int:
    """Start time of a process, in milliseconds since the epoch. 0 if the process cannot be inspected."""
    try:
        return round(psutil.Process(pid).create_time() * 1000)
    except psutil.Error:
        return 0


def _parse(content: bytes) -> Beat:
    words: dict[str, Any] = dict(zip(_WORDS, struct.unpack_from(f"{len(_WORDS)}q", content), strict=True))
    texts = {
        what: content[start : start + _TEXT_BYTES[what]].partition(b"\0")[0].decode(errors="replace")
        for what, start in _TEXTS.items()
    }
    del words["layout"]
    if not texts["op"]:
        texts["axis"], texts["purpose"], words["peer"] = "", "", NO_PEER
    return Beat(**(words | texts))
