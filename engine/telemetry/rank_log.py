"""Everything that a rank says goes to its log file; what rank 0 says goes to the terminal too (no torch here).

    rank 3    print, warnings, C++ and NCCL (file descriptors 1 and 2)  ->  rank_00003.log
    rank 0    the same                                                  ->  tee  ->  rank_00000.log and the terminal
              the progress bar                                          ->  the terminal alone

`tee` is a process of its own and ends with the last writer, so that the last words of a rank 0 that crashes in C++ are not
lost with it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_TEE_ENDS_SECONDS = 2.0
"""A child of this rank may still hold the pipe; it must not keep the rank from ending."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Where a rank writes while `rank_log` is active.

    Attributes:
        log: the log file, line by line.
        terminal: standard output as it was before; None on ranks that are not shown.
    """

    log: TextIO
    terminal: TextIO | None


@contextmanager
def rank_log(path: Path, *, show: bool) -> Iterator[Streams]:
    """Send this process's standard output and error to `path` (appended), and with `show` also to where they went before.

    Exceptions pass through unprinted: print them inside, or they miss the log.

    Raises:
        OSError: the log cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    before = sys.stdout, sys.stderr
    for stream in before:
        stream.flush()
    saved = os.dup(1), os.dup(2)
    tee: subprocess.Popen[bytes] | None = None
    with path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace") as log:
        terminal = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace") if show else None
        try:
            if show:
                # A session of its own, and deaf: Ctrl-C and the launcher's signals are for the rank, but SLURM sends them to every
                # process of a job. tee ends when the rank has; a rank without it could not say that it saves.
                tee = subprocess.Popen(
                    ["sh", "-c", 'trap "" TERM INT USR1; exec tee -a "$0"', str(path)],
                    stdin=subprocess.PIPE,
                    stdout=saved[0],
                    start_new_session=True,
                )
                assert tee.stdin is not None, "it was asked for a pipe"
                target = tee.stdin.fileno()
            else:
                target = log.fileno()
            os.dup2(target, 1)
            os.dup2(target, 2)
            if tee is not None and tee.stdin is not None:
                tee.stdin.close()
            sys.stdout, sys.stderr = _text(1), _text(2)
            yield Streams(log, terminal)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = before
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            for descriptor in saved:
                os.close(descriptor)
            if tee is not None:
                _wait(tee)
            if terminal is not None:
                terminal.close()


def _text(descriptor: int) -> TextIO:
    """A file descriptor as text, a line at a time; it stays open when the object goes."""
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _wait(tee: subprocess.Popen[bytes]) -> None:
    try:
        tee.wait(_TEE_ENDS_SECONDS)
    except subprocess.TimeoutExpired:
        tee.kill()
        tee.wait()
