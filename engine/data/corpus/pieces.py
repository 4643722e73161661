"""Files of a corpus and the pieces into which they are cut (no torch here)."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file as it was found. Size and time stand for its content, which may be terabytes."""

    path: Path
    size: int
    mtime_ns: int

    @staticmethod
    def of(path: Path) -> "InputFile":
        """Look at a file; OSError where there is none."""
        found = path.stat()
        return InputFile(path, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file that is read by itself, `start` to `stop` - 1 of what its reader counts (bytes, row groups)."""

    file: InputFile
    start: int
    stop: int
    num_bytes: int
    """Its share of the file's bytes; those of all pieces add up to the file."""


Unit = tuple[Piece, ...]
"""Pieces that one worker encodes into one part of the corpus."""


def share(num_bytes: int, number: int, count: int) -> int:
    """Return the bytes of part `number` where a file is counted as `count` equal parts."""
    return num_bytes * (number + 1) // count - num_bytes * number // count
