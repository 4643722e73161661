"""These tests need torch's CUDA build on the stub, which `bash tests/run.sh --cuda-stub` makes; else one line says so."""

import os
import sys
from pathlib import Path

import pytest

from tests.cuda_stub.environment import FOLDER

IS_ON_STUB = sys.prefix == str(FOLDER)

collect_ignore_glob = ["test_without_stub.py"] if IS_ON_STUB else ["test_[!w]*.py"]

if IS_ON_STUB:
    from tests.cuda_stub.build import variables

    os.environ.update(variables(), CARD_VALUES="1")
    import tests.cuda_stub.start  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cuda_stub)
        if IS_ON_STUB and item.get_closest_marker("card") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a real card, and this is the stub"))
