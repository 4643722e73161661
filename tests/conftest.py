"""Tests marked `gpu` skip where torch finds no CUDA device. Tests start with SIGHUP as a terminal leaves it, and leave the
environment as they find it: a launcher inside of a test sets what its ranks need, and the next file of the worker would read it.

Property tests draw new examples in every run; continuous integration repeats the same ones, so that a change is judged by itself.
None has a deadline: a busy machine is not a wrong answer.
"""

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest


def pytest_configure() -> None:
    is_ci = os.environ.get("TRIAXIS_CI") == "strict"
    hypothesis.settings.register_profile("triaxis", derandomize=is_ci, deadline=None)
    hypothesis.settings.load_profile("triaxis")
    # A CI service, or nohup, may have ignored it. Every process that a test starts would ignore it too, and bash cannot undo that.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Give back the variables of a test's start."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name != "PYTEST_CURRENT_TEST"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch finds none"))
