"""Forward a launcher's signals to its ranks, which finish their step and save.

    SIGTERM, SIGUSR1, SIGHUP, SIGINT    forwarded to every rank on this node; the launcher waits LONGEST_SAVE_SECONDS at most
    SIGINT again                        forwarded too; a rank that still runs after AT_ONCE_SECONDS is killed
    SIGHUP under nohup                  ignored, as it was when the launcher began
    SIGUSR2                             ends the ranks with SIGTERM, then SIGKILL
    first row, but before ranks start   end the launcher, even inside a call that does not return to Python

torchrun by itself would end the ranks 30 seconds after the signal, saved or not.
"""

import argparse
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

from triaxis.engine.comm.stop import STOP_OF_SIGNAL, stop_signals
from triaxis.launch.start.process.seen_signals import seen_at_once

LONGEST_SAVE_SECONDS = 1800.0
"""Limit after which a rank is assumed to hang on its disk or a peer."""

AT_ONCE_SECONDS = 5.0

END_RANKS = signal.SIGUSR2
"""Signal from a launcher of several hosts to the others once one has failed. SIGQUIT would make every rank dump core."""

LEFT_TO_TORCHRUN = "SIGQUIT"
"""The signal that torchrun still handles itself, by ending its ranks."""


class NoRanksError(Exception):
    """A signal came before any rank started, so there is nothing to save."""


class ForwardedSignals:
    """A launcher's signals while its ranks run.

    Args:
        leave: function (signal) that ends this process. It is called if no rank has started, and the main thread does not handle
            a signal within a second. None: no such function.

    Attributes:
        first: first signal received; None: none came.
    """

    def __init__(self, leave: Callable[[signal.Signals], object] | None = None) -> None:
        self.first: signal.Signals | None = None
        self._leave = leave
        self._killer: threading.Timer | None = None

    @contextmanager
    def listening(self, words: argparse.Namespace) -> Iterator["ForwardedSignals"]:
        """Forward signals to the ranks while the block runs torchrun.

        Args:
            words: torchrun's parsed arguments; may be changed, so that torchrun leaves these signals alone.

        Raises:
            NoRanksError: inside the block, if a signal comes before the first rank is started.
        """
        before = {number: signal.signal(number, self._on_signal) for number in stop_signals()}
        before[END_RANKS] = signal.signal(END_RANKS, _end_ranks)
        try:
            with self._instead_of_torchruns(words), seen_at_once(self._leave_without_ranks):
                yield self
        finally:
            if self._killer is not None:
                self._killer.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _instead_of_torchruns(self, words: argparse.Namespace) -> Iterator[None]:
        """Keep torchrun from handling the signals that we forward, inside the block.

        From torch 2.10 on, `words.signals_to_handle` does this. In torch 2.9, torchrun's signal handler is replaced.
        """
        if hasattr(words, "signals_to_handle"):
            words.signals_to_handle = LEFT_TO_TORCHRUN
            yield
            return
        from torch.distributed.elastic.multiprocessing import api

        installed, torchruns, ours = vars(api), api._terminate_process_handler, stop_signals()

        def handle(number: int, frame: FrameType | None) -> None:
            if number in STOP_OF_SIGNAL:
                if number in ours:
                    self._on_signal(number, frame)
            else:
                torchruns(number, frame)

        installed["_terminate_process_handler"] = handle
        try:
            yield
        finally:
            installed["_terminate_process_handler"] = torchruns

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again = self.first is signal.SIGINT and number == signal.SIGINT
        if self.first is None:
            self.first = signal.Signals(number)
        found = ranks()
        if not found:
            raise NoRanksError
        for rank in found:
            _send(rank, number)
        if again or self._killer is None:
            self._kill_after(AT_ONCE_SECONDS if again else LONGEST_SAVE_SECONDS)

    def _leave_without_ranks(self, number: signal.Signals) -> None:
        # Ranks that were told to stop may have ended by now, and torchrun sees their exit codes soon.
        was_handed_on = self._killer is not None
        if self._leave is not None and number in STOP_OF_SIGNAL and not was_handed_on and not ranks():
            self._leave(number)

    def _kill_after(self, seconds: float) -> None:
        if self._killer is not None:
            self._killer.cancel()
        self._killer = threading.Timer(seconds, _kill_ranks, [seconds])
        self._killer.daemon = True
        self._killer.start()


def _end_ranks(number: int, frame: FrameType | None) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException("another host has failed", signal.SIGTERM)


def ranks() -> list[psutil.Process]:
    """List the live ranks that this process has started."""
    found = []
    for child in psutil.Process().children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and "RANK" in child.environ():
                found.append(child)
        except psutil.Error:
            continue  # it has just ended
    return found


def _send(rank: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):
        rank.send_signal(number)


def _kill_ranks(seconds: float) -> None:
    for rank in ranks():
        _send(rank, signal.SIGKILL)
    with suppress(OSError):  # after the kill: the terminal may be gone or paused
        os.write(2, f"ranks that have not ended within {seconds:g} seconds are killed\n".encode())
