"""Check the arguments and standard streams of a process that a person or a launcher has just started.

closed descriptors   opened on /dev/null, so that no file of the run becomes a standard stream
secrets              redacted in everything that Python prints
unwritable output    an error message instead of a traceback
foreign bytes        an argument that is not UTF-8 is refused
"""

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from triaxis.engine.errors import ConfigError
from triaxis.engine.storage.redaction import blotted_streams


@contextmanager
def standard_streams() -> Iterator[None]:
    """Open any closed standard descriptor, and redact secrets in what the block prints.

    Buffers are flushed at the end of the block.

    Raises:
        OutputError: standard output cannot be written, as on a full disk.
        BrokenPipeError: the reader of standard output is gone.
    """
    _open_closed()
    with blotted_streams():
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def drop_output() -> None:
    """Discard the rest of standard output, so that Python's flush at exit does not fail again."""
    with suppress(OSError, io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_words(arguments: Sequence[str]) -> None:
    """Refuse arguments that are not UTF-8, because configurations and logs could not store them.

    Raises:
        ConfigError: all such arguments, as bytes.
    """
    problems = [
        f"{os.fsencode(word)!r} is not UTF-8, so configurations, logs and checkpoints could not store it. Rename the "
        "file, or type the word in UTF-8."
        for word in arguments
        if any("\ud800" <= character <= "\udfff" for character in word)
    ]
    if problems:
        raise ConfigError(problems, "the command line")


def _open_closed() -> None:
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            # os.open returns the lowest free number, which is this one. Children inherit it too.
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="replace", closefd=False))
