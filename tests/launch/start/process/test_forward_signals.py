"""Signals for the ranks are kept away from torchrun, in each version of torch."""

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import api

from triaxis.launch.start.process.forward_signals import (
    END_RANKS,
    LEFT_TO_TORCHRUN,
    ForwardedSignals,
    NoRanksError,
    ranks,
)
from triaxis.launch.start.process.seen_signals import STUCK_SECONDS

handler: Any = vars(api)["_terminate_process_handler"]


def test_an_argument_leaves_torchrun_the_other_signals() -> None:
    words = Namespace(signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    with ForwardedSignals().listening(words):
        assert words.signals_to_handle == LEFT_TO_TORCHRUN
        assert vars(api)["_terminate_process_handler"] is handler


def test_without_the_argument_its_one_handler_hands_on() -> None:
    """torch 2.9 installs its handler for all signals once the launcher has installed its own."""
    signals, words = ForwardedSignals(), Namespace()
    with signals.listening(words):
        installed = vars(api)["_terminate_process_handler"]
        with pytest.raises(api.SignalException):
            installed(signal.SIGQUIT, None)
        assert signals.first is None
        with pytest.raises(NoRanksError):
            installed(signal.SIGTERM, None)
        assert signals.first is signal.SIGTERM
        with pytest.raises(NoRanksError):
            installed(signal.SIGHUP, None)
    assert vars(api)["_terminate_process_handler"] is handler
    assert vars(words) == {}


@pytest.fixture
def nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("words", [Namespace(), Namespace(signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT")])
def test_under_nohup_a_hangup_stays_ignored(nohup: None, words: Namespace) -> None:
    signals = ForwardedSignals()
    with signals.listening(words):
        assert "SIGHUP" not in vars(words).get("signals_to_handle", "")
        if not vars(words):
            vars(api)["_terminate_process_handler"](signal.SIGHUP, None)
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signals.first is None


def test_another_host_that_failed_ends_torchrun_with_sigterm() -> None:
    before = signal.getsignal(END_RANKS)
    with ForwardedSignals().listening(Namespace()), pytest.raises(api.SignalException) as ended:
        os.kill(os.getpid(), END_RANKS)
    assert ended.value.sigval == signal.SIGTERM
    assert signal.getsignal(END_RANKS) == before


def test_ranks_are_killed_though_the_terminal_is_gone() -> None:
    program = (
        "import os, subprocess\n"
        "from triaxis.launch.start.process.forward_signals import _kill_ranks, ranks\n"
        "rank = subprocess.Popen(['sleep', '60'], env=os.environ | {'RANK': '0'})\n"
        "while not ranks(): pass\n"
        "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 2)\n"
        "_kill_ranks(1.0)\n"
        "print(rank.wait(30))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "-9\n")


def test_a_launcher_whose_ranks_have_saved_and_ended_waits_for_torchruns_word() -> None:
    """The ranks end within the second after which a signal counts as not seen."""
    left: list[signal.Signals] = []
    rank = subprocess.Popen(["sleep", "60"], env=os.environ | {"RANK": "0"})
    with ForwardedSignals(left.append).listening(Namespace(signals_to_handle="")):
        while not ranks():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert rank.wait(30) == -signal.SIGTERM
        time.sleep(STUCK_SECONDS + 0.3)
    assert left == []
