"""Preparations without processes of their own."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from triaxis.launch.prepare import prepare as prepare_module


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode in a thread: starting processes takes longer than what most tests encode."""

    def threads(num_workers: int, **settings: Any) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(num_workers)

    monkeypatch.setattr(prepare_module, "ProcessPoolExecutor", threads)
