"""What a rank is asked by signals, and what all ranks make of it."""

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.comm.agreement import StopFlags
from triaxis.engine.comm.stop import STOP_OF_SIGNAL, Stop, StopRequest


def test_nobody_asked() -> None:
    request = StopRequest()
    assert request.flags() == StopFlags()
    request.decide(StopFlags())
    assert request.agreed is None


@pytest.mark.parametrize(
    ("number", "stop", "flags"),
    [
        (signal.SIGTERM, Stop.PREEMPTED, (1.0, 0.0)),
        (signal.SIGUSR1, Stop.PREEMPTED, (1.0, 0.0)),
        (signal.SIGHUP, Stop.PREEMPTED, (1.0, 0.0)),
        (signal.SIGINT, Stop.INTERRUPTED, (0.0, 1.0)),
    ],
)
def test_a_signal_raises_a_flag_and_says_so_once(number, stop, flags, capfd) -> None:
    before = [signal.getsignal(each) for each in STOP_OF_SIGNAL]
    request = StopRequest(rank=3)
    request.listen()
    try:
        for _ in range(2 if stop is Stop.PREEMPTED else 1):
            os.kill(os.getpid(), number)
    finally:
        request.close()
    assert request.flags() == flags
    assert request.agreed is None, "it is the ranks together who agree"
    assert capfd.readouterr().err == f"rank 3: {number.name}: all ranks finish their step, save and stop\n"
    assert [signal.getsignal(each) for each in STOP_OF_SIGNAL] == before


def test_a_hangup_that_nohup_ignores_asks_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request = StopRequest()
    request.listen()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        assert request.flags() == StopFlags()
    finally:
        request.close()
        signal.signal(signal.SIGHUP, before)


def test_a_signal_asks_though_nothing_can_be_said() -> None:
    program = (
        "import os, signal, sys; from triaxis.engine.comm.stop import StopRequest\n"
        "request = StopRequest(); request.listen(); os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"
        "os.kill(os.getpid(), signal.SIGTERM); print(tuple(request.flags()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "(1.0, 0.0)\n")


def test_a_second_ctrl_c_ends_the_rank_at_once() -> None:
    program = (
        "import os, signal, time; from triaxis.engine.comm.stop import StopRequest\n"
        "StopRequest().listen()\n"
        "os.kill(os.getpid(), signal.SIGINT); print('on', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(60); print('still here')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGINT, "on\n")


@given(
    st.lists(
        st.lists(st.sampled_from([None, Stop.PREEMPTED, Stop.INTERRUPTED]), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    )
)
def test_all_ranks_agree_in_every_step(steps: list[list[Stop | None]]) -> None:
    ranks = [StopRequest(rank) for rank in range(3)]
    for step in steps:
        for rank, asked in zip(ranks, step, strict=True):
            if asked is not None:
                rank.ask(asked)
        sums = [sum(flags) for flags in zip(*(rank.flags() for rank in ranks), strict=True)]
        for rank in ranks:
            rank.decide(sums)
        assert len({rank.agreed for rank in ranks}) == 1
    asked_for = {asked for step in steps for asked in step}
    strongest = Stop.INTERRUPTED if Stop.INTERRUPTED in asked_for else Stop.PREEMPTED
    assert ranks[0].agreed is (None if asked_for == {None} else strongest)
