"""Signals that a thread sees at once, regardless of the call that the main thread is in."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STUCK_SECONDS = 1.0
"""Time for a process to end by itself. A Python handler runs only once the current call returns."""


@contextmanager
def seen_at_once(stuck: Callable[[signal.Signals], None], after_seconds: float = STUCK_SECONDS) -> Iterator[None]:
    """Call `stuck` in a thread for each signal with a Python handler that comes inside the block, unless the block ends first.

    The thread sees signals through the interpreter's wake-up descriptor, which is written whatever the main thread does.
    """
    heard, told = socket.socketpair()
    told.setblocking(False)
    over = threading.Event()

    def listen() -> None:
        while numbers := heard.recv(1):
            if over.wait(after_seconds):
                return
            stuck(signal.Signals(numbers[0]))

    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        told.close()
        thread.join()
        heard.close()
