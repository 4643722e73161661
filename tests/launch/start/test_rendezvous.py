"""Nodes that meet: who is missing is said, and an end comes in bounded time."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from triaxis.launch.start import rendezvous
from triaxis.launch.start.process.seen_signals import seen_at_once
from triaxis.launch.start.rendezvous import NodesMissingError, wait_for


def test_nodes_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rendezvous, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.001)
    with pytest.raises(NodesMissingError, match=r"node 3 of 4 nodes did not come to 10\.0\.0\.1 port 29500"):
        wait_for(lambda: [3], 4, "10.0.0.1 port 29500", limit_seconds=0.01)
    said = capsys.readouterr().err
    assert said == "waiting for node 3 (of 0 .. 3) at 10.0.0.1 port 29500, since 0 s; Ctrl-C ends it\n", "once"


def test_nodes_that_are_here_are_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    wait_for(list, 2, "10.0.0.1 port 29500")
    assert capsys.readouterr().err == ""


def test_a_signal_is_seen_while_the_main_thread_is_in_a_call() -> None:
    """`heard` is set by the thread; the handler itself could only run after the main thread's call."""
    heard, before = threading.Event(), signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with seen_at_once(lambda number: heard.set() if number == signal.SIGUSR1 else None, after_seconds=0.0):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard.wait(5.0)
    finally:
        signal.signal(signal.SIGUSR1, before)


RANK_IN_A_CALL = """
import ctypes
from triaxis.launch.start.process.ending import run_rank
def main(words):
    print("in the call", flush=True)
    mutex = ctypes.create_string_buffer(64)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(mutex)  # the second call waits for ever, and no signal ends it
run_rank(main, [])
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_rank_that_is_in_a_call_before_it_trains() -> None:
    started = subprocess.Popen([sys.executable, "-c", RANK_IN_A_CALL], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "in the call\n"
    time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    assert started.wait(10.0) == 130
