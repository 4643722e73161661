"""Writes and reads files with one JSON object per line.

    {"step": 1, "attempt": 0, ..., "loss": 5.5491, ...}
    {"step": 2, "attempt": 0, ..., "loss": 5.4710, ...}
    {"step": 3, "att                                      <- the run was killed here: cut off when the file is opened again

metrics.jsonl and the event files have this form. Each line is readable as soon as it is written. Floats keep all
their digits. NaN and infinity, which JSON lacks, are written as the strings "nan", "inf", "-inf".
"""

import json
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.storage.json_text import parse_json
from triaxis.engine.storage.redaction import without_secrets

MOST_WAITING_BYTES = 16 * 2**20
"""Limit in bytes on lines that wait for disk space: metrics for some ten thousand steps."""

_UNKNOWN = -1
"""Value of `_torn_at` if the file ended in a torn line when it was opened: another process may still be completing that line."""


class JsonLines:
    """A JSON lines file to which all attempts in a run append objects.

    Objects that the disk refuses wait in memory, in order, until a later call succeeds. Beyond `MOST_WAITING_BYTES` they are lost.

    Args:
        path: file to append to, created if missing.
        heals: whether to cut off a torn last line; must be False if another process appends too. If False, a torn last line
            stays, and the first object here starts on a new line.

    Attributes:
        name: the file's name.
        num_healed_bytes: number of bytes cut off from a half-written line.
        error: error because of which objects wait; None if none wait.
        num_lost: number of objects that were never written.
    """

    def __init__(self, path: Path, *, heals: bool = True) -> None:
        self.path, self.name = path, path.name
        self.num_healed_bytes = heal(path) if heals else 0
        self.error: OSError | None = None
        self.num_lost = 0
        self._file = path.open("ab", buffering=0)
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._torn_at: int | None = None if heals or _ends_with_newline(path) else _UNKNOWN
        self._rest = b""

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object in one write, with secrets redacted.

        Unless `error` is set on return, the operating system has the whole line.
        """
        line = (without_secrets(json.dumps(_plain(record), allow_nan=False, ensure_ascii=False)) + "\n").encode()
        with self._lock:
            if self._waiting_bytes + len(line) > MOST_WAITING_BYTES:
                self.num_lost += 1
            else:
                self._waiting.append(line)
                self._waiting_bytes += len(line)
            self._write_waiting()

    def retry(self) -> None:
        """Write as many of the waiting objects as the disk has room for."""
        with self._lock:
            self._write_waiting()

    def reopen(self) -> None:
        """Open the path again after the open file was removed or moved.

        Raises:
            OSError: the path cannot be opened; the old file then stays open.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab", buffering=0)
        with self._lock:
            self._file.close()
            self._file = file
            self._torn_at, self._rest = None, b""

    def close(self) -> None:
        """Try once more to write the waiting objects, then close. Objects that still wait are lost."""
        with self._lock:
            if self._file.closed:
                return
            self._write_waiting()
            self.num_lost += len(self._waiting)
            self._waiting.clear()
            try:
                self._file.close()
            except OSError as error:
                self.error = error

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting_bytes -= len(self._waiting.popleft())
        except OSError as error:
            self.error = error
        else:
            self.error = None

    def _append(self, line: bytes) -> None:
        """Write a line. If an earlier failed call left this line unfinished at the file's end, write only the rest.

        Raises:
            OSError: the line was not written, or only in part.
        """
        rest = line
        if self._torn_at is not None:
            is_last = os.fstat(self._file.fileno()).st_size == self._torn_at
            rest = self._rest if is_last else b"\n" + line
        while rest:
            rest = rest[self._file.write(rest) :]
            self._torn_at, self._rest = (self._file.tell(), rest) if rest else (None, b"")


def heal(path: Path) -> int:
    """Make a file end with a complete line. Return the number of bytes cut off.

    If a complete last object lacks only its newline, the newline is added.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = _start_of_last_line(file.fileno(), size)
        file.seek(start)
        rest = file.read()
        if not rest:
            return 0
        try:
            parse_json(rest)
        except ValueError:
            file.truncate(start)
            return len(rest)
        file.write(b"\n")
        return 0


@dataclass(frozen=True, slots=True)
class Records:
    """Objects read from a JSON lines file.

    Attributes:
        records: objects, in line order.
        num_unreadable: number of lines that hold no JSON object, a torn end included; empty lines do not count.
        end: byte after the last complete line, where a later read continues.
    """

    records: Sequence[Mapping[str, Any]]
    num_unreadable: int
    end: int


def read_records(
    path: Path, start: int = 0, kept: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda record: record
) -> Records:
    """Read a file's objects from byte `start`, which must begin a line.

    An unfinished last line and lines without a JSON object are skipped, and counted in `num_unreadable`. Empty lines are
    ignored. If there is no file, the result is empty.

    Args:
        kept: function that reduces each object to what the caller needs, to save memory.
    """
    if not path.is_file():  # reading a FIFO would block
        return Records([], 0, start)
    records, num_unreadable, end = list[Mapping[str, Any]](), 0, start
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                num_unreadable += 1
                break
            end += len(line)
            with suppress(ValueError):
                record = parse_json(line if line != b"\n" else b"null")
                if isinstance(record, dict):
                    records.append(kept(record))
                    continue
            num_unreadable += line != b"\n"
    return Records(records, num_unreadable, end)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        return size == 0 or os.pread(file.fileno(), 1, size - 1) == b"\n"


def _start_of_last_line(descriptor: int, size: int) -> int:
    """Find the position after the last newline, reading backwards in blocks."""
    block_bytes = 64 * 2**10
    end = size
    while end > 0:
        start = max(0, end - block_bytes)
        at = os.pread(descriptor, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
