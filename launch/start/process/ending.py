"""End a rank's process within seconds, with its own exit code.

    run_rank      runs any worker's `main`, prints its error, and ends the process with its exit code
    WayOut        bounds the time to close everything after a failure to GRACE_SECONDS
    end           flushes the output and exits

No rank runs the interpreter's teardown, because it may hang or abort after a failure. Destroying an NCCL communicator waits for
every posted send and receive, even if the peer is gone. Some C++ libraries' destructors abort the process if threads still run.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, Self

from triaxis.engine.errors import ExitCode, TriaxisError
from triaxis.engine.storage.user_module import place_in_user_module
from triaxis.launch.start.process.failure import ExplainedError, code_of
from triaxis.launch.start.process.front import standard_streams
from triaxis.launch.start.process.lasting_output import lasting_output
from triaxis.launch.start.process.seen_signals import seen_at_once

GRACE_SECONDS = 20.0
"""Limit for closing after a failure: a profiler and a checkpoint's copies wait for the device, which may never finish."""


Main = Callable[[Sequence[str]], int]
"""Type of a worker's `main`, which each rank runs: from words to an exit code."""


def run_rank(main: Main, arguments: Sequence[str]) -> NoReturn:
    """Run `main(arguments)` and end this process with its exit code.

    Until the worker handles Ctrl-C, Ctrl-C ends the process at once.
    """
    with standard_streams(), lasting_output(), seen_at_once(_end_unless_heard):
        end(exit_code(main, arguments))


def _end_unless_heard(number: signal.Signals) -> None:
    """End this process at once if SIGINT still has Python's default handler.

    That handler would run only when the current call returns to Python, which may never happen.
    """
    if number == signal.SIGINT and signal.getsignal(number) is signal.default_int_handler:
        end(ExitCode.INTERRUPTED)


def exit_code(main: Main, arguments: Sequence[str]) -> int:
    """Run `main(arguments)` and return its exit code. An exception that ends `main` is printed.

    ExplainedError and Ctrl-C are not printed. Only rank 0 prints a TriaxisError, because all ranks make the same mistake.
    """
    try:
        return main(arguments)
    except (Exception, KeyboardInterrupt) as error:
        speaks = not isinstance(error, TriaxisError) or os.environ.get("RANK", "0") == "0"
        if speaks and not isinstance(error, ExplainedError | KeyboardInterrupt):
            print_error(error)
        return code_of(error)


def print_error(error: BaseException) -> None:
    """Print a TriaxisError's message, "interrupted" for Ctrl-C, and a traceback for any other error."""
    if isinstance(error, TriaxisError):
        print(f"error: {error}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        if place := place_in_user_module(error):
            print(f"error in {place}: {type(error).__name__}: {error}", file=sys.stderr)
        traceback.print_exception(error)


class WayOut:
    """A time limit for a failing rank to close its files, threads and groups.

    Use it as a context around everything that must be closed. The first failure in a `bounded` block starts the clock, and leaving
    the context stops the clock.

    Args:
        grace_seconds: time from the failure to the end of the process.
        leave: function (exit code) that ends the process; None: `end`.
    """

    def __init__(self, grace_seconds: float = GRACE_SECONDS, leave: Callable[[int], object] | None = None) -> None:
        self._grace_seconds = grace_seconds
        self._leave = leave or end
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @contextmanager
    def bounded(self, agreed: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
        """Limit the time for closing from the moment when an exception leaves the block.

        If closing takes longer than `grace_seconds`, the process ends with the exception's exit code.

        Args:
            agreed: exceptions that all ranks raise together; they set no limit, because no call hangs after them.
        """
        try:
            yield
        except BaseException as error:
            if self._timer is None and not isinstance(error, agreed):
                self._timer = threading.Timer(self._grace_seconds, self._give_up, [code_of(error)])
                self._timer.daemon = True
                self._timer.start()
            raise

    def _give_up(self, code: int) -> None:
        print(
            f"closing took longer than {self._grace_seconds:g} seconds, so this rank ends without closing",
            file=sys.stderr,
        )
        self._leave(code)


def end(code: int) -> NoReturn:
    """Flush standard output and error, and end the process with `code`."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(code)
