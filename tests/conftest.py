"""Tests marked `gpu` skip where torch finds no CUDA device. Tests start with SIGHUP as a terminal leaves it.

Property tests draw new examples in every run; continuous integration repeats the same ones, so that a change is judged by itself.
None has a deadline: a busy machine is not a wrong answer.
"""

import os
import signal

import hypothesis
import pytest


def pytest_configure() -> None:
    is_ci = os.environ.get("TRIAXIS_CI") == "strict"
    hypothesis.settings.register_profile("triaxis", derandomize=is_ci, deadline=None)
    hypothesis.settings.load_profile("triaxis")
    # A CI service, or nohup, may have ignored it. Every process that a test starts would ignore it too, and bash cannot undo that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none"))
