"""One JSON object per line, there as soon as it is written: metrics.jsonl, and files of events.

    {"step": 1, "attempt": 0, ..., "loss": 5.5491, ...}\n
    {"step": 2, "attempt": 0, ..., "loss": 5.4710, ...}\n
    {"step": 3, "att                                      <- the run was killed here: cut off when the file is opened again

Floats are written with all their digits: reading gives the same float64. JSON has no NaN and no infinity; those are
written as the strings "nan", "inf", "-inf".
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
"""Bytes of lines that wait for room on the disk: the metrics of some ten thousand steps."""

_UNKNOWN = -1
"""Place of a torn end that another process may be completing."""


class JsonLines:
    """A file to which objects are appended, over all attempts of a run.

    Objects that the disk refuses wait in memory, in order, and every later call tries again. Beyond `MOST_WAITING_BYTES` they are
    lost. A line of which a part was written is completed; where another process has appended since, it is written again.

    Args:
        path: made where it is missing. A last line that is not whole is cut off.
        heals: false where another process appends too and may be in the middle of a line: a torn end is then left alone, and
            ended, so that what follows has lines of its own.

    Attributes:
        num_healed_bytes: how much of a half-written line was cut off.
        error: why objects wait; None: none do.
        num_lost: objects that were lost.
    """

    def __init__(self, path: Path, *, heals: bool = True) -> None:
        self.path = path
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
        """Append one object in one call. Without an `error` it has left this process when this returns."""
        line = (without_secrets(json.dumps(_plain(record), allow_nan=False, ensure_ascii=False)) + "\n").encode()
        with self._lock:
            if self._waiting_bytes + len(line) > MOST_WAITING_BYTES:
                self.num_lost += 1
            else:
                self._waiting.append(line)
                self._waiting_bytes += len(line)
            self._write_waiting()

    def retry(self) -> None:
        """Write the objects that wait, as far as there is room."""
        with self._lock:
            self._write_waiting()

    def reopen(self) -> None:
        """Append to the file that has the path now; the one that was open may have been removed or moved.

        Raises:
            OSError: it cannot be opened; the file that was open stays open.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab", buffering=0)
        with self._lock:
            self._file.close()
            self._file = file
            self._torn_at, self._rest = None, b""

    def close(self) -> None:
        """Try once more to write what waits; objects that still wait are lost."""
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
        """Write a line, or the rest of it where the file still ends with its beginning.

        Raises:
            OSError: it was not written, or not whole.
        """
        rest = line
        if self._torn_at is not None:
            is_last = os.fstat(self._file.fileno()).st_size == self._torn_at
            rest = self._rest if is_last else b"\n" + line
        while rest:
            rest = rest[self._file.write(rest) :]
            self._torn_at, self._rest = (self._file.tell(), rest) if rest else (None, b"")


def heal(path: Path) -> int:
    """Make a file end with a whole line; returns the number of bytes cut off.

    A last line that is a whole object and lacks only its newline gets one.
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
    """The result of reading JSON lines.

    Attributes:
        records: the objects, in the order of their lines.
        num_unreadable: lines that hold no JSON object, a torn end among them.
        end: byte behind the last whole line: where a later reading goes on.
    """

    records: Sequence[Mapping[str, Any]]
    num_unreadable: int
    end: int


def read_records(
    path: Path, start: int = 0, kept: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda record: record
) -> Records:
    """Read the objects of a file from byte `start` on, which is the beginning of a line; none where there is no file.

    A last line that was never ended and a line that is no object are counted, not raised: a run that was killed leaves one.

    Args:
        kept: of an object, what stays in memory.
    """
    if not path.is_file():  # a FIFO would be waited for
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
    """Return the place behind the last newline, read backwards in blocks: the file of a long run is large."""
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
