"""Let a launcher or rank outlive its terminal.

A print that cannot be written neither fails nor blocks for long:

    triaxis train config.yaml | head    the banner fills head; the run goes on, and its later output is lost
    triaxis train config.yaml > file    the file's disk is full for a while; lost lines are counted in the file
    Ctrl-S                              a line waits for PATIENCE_SECONDS, then lines are lost and counted; the process goes on
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from triaxis.engine.storage.redaction import blotted
from triaxis.engine.telemetry.outlets.lossy_file import LossyFile, TextLines

PATIENCE_SECONDS = 10.0
"""How long a paused terminal may block a launcher, or a rank whose log is not open."""


@contextmanager
def lasting_output() -> Iterator[None]:
    """Keep prints inside the block from raising OSError or blocking longer than `PATIENCE_SECONDS`.

    Streams that have no descriptor stay as they are.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before


def _lasting(stream: TextIO) -> TextIO:
    """Open a stream on the same descriptor, whose writes block for `PATIENCE_SECONDS` at most.

    After that, lines are lost. Without a descriptor, return `stream` itself.
    """
    if stream is None:
        return stream
    with suppress(OSError):
        stream.flush()
    try:
        return blotted(TextLines(LossyFile(stream.fileno(), patience_seconds=PATIENCE_SECONDS)))
    except OSError:  # io.UnsupportedOperation
        return stream
