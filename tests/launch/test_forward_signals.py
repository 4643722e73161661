"""Signals for the ranks are kept away from torchrun, in each version of torch."""

import signal
from argparse import Namespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import api

from launch.forward_signals import LEFT_TO_TORCHRUN, ForwardedSignals, NoRanksError

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
    assert vars(api)["_terminate_process_handler"] is handler
    assert vars(words) == {}
