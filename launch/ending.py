"""The end of a rank's process: its output is flushed and it leaves with its own exit code, within seconds (no torch here).

    run_rank      runs the rank's `main`, then ends the process
    ends_soon     after a failure inside, everything that is closed on the way out shares GRACE_SECONDS
    end           flushes and leaves

No rank runs the interpreter's teardown. It joins threads and destroys process groups, and both may wait for ever after a failure:
destroying a NCCL communicator waits for every send and receive that was posted, also when the peer is gone.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from engine.errors import TriaxisError
from launch.failure import code_of

GRACE_SECONDS = 20.0
"""What closing may take after a failure: a profiler and a checkpoint's copies wait for the device, which may never finish."""


def run_rank(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> NoReturn:
    """End this process with the exit code of `main(arguments)`; an exception is printed and ends it with `code_of` it."""
    try:
        code = main(arguments)
    except TriaxisError as error:
        print(f"error: {error}", file=sys.stderr)
        code = code_of(error)
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exc()
        code = code_of(error)
    end(code)


@contextmanager
def ends_soon(
    grace_seconds: float = GRACE_SECONDS,
    agreed: tuple[type[BaseException], ...] = (),
    leave: Callable[[int], object] | None = None,
) -> Iterator[None]:
    """Bound the way out of a failure: `grace_seconds` after an exception leaves this block, the process ends with its code.

    Args:
        grace_seconds: for everything that is closed meanwhile.
        agreed: exceptions that all ranks raise together; no call hangs after them, and the run may end with another code.
        leave: ends the process with an exit code; None: `end`.
    """

    def give_up(code: int) -> None:
        print(f"closing takes longer than {grace_seconds:g} seconds, so this rank ends without it", file=sys.stderr)
        (leave or end)(code)

    try:
        yield
    except BaseException as error:
        if isinstance(error, agreed):
            raise
        timer = threading.Timer(grace_seconds, give_up, [code_of(error)])
        timer.daemon = True
        timer.start()
        raise


def end(code: int) -> NoReturn:
    """Flush standard output and error, and end the process with `code`."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(code)
