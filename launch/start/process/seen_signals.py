"""Notice signals at once in a separate thread, even while the main thread is inside a long call."""

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STUCK_SECONDS = 1.0
"""Time for the main thread to handle a signal; a Python handler runs only once the current call returns."""


@contextmanager
def seen_at_once(stuck: Callable[[signal.Signals], None], after_seconds: float = STUCK_SECONDS) -> Iterator[None]:
    """Call `stuck` in a thread `after_seconds` after each signal, unless the block has ended.

    Only signals with a Python handler count.
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
