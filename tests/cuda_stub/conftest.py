"""These tests need torch's CUDA build on the stub, which `bash tests/run.sh --cuda-stub` makes; else one line says so."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_stub.environment import FOLDER

IS_ON_STUB = sys.prefix == str(FOLDER)

collect_ignore_glob = ["test_without_stub.py"] if IS_ON_STUB else ["test_[!w]*.py"]

if IS_ON_STUB:
    # Triton looks for the driver by itself; kernels that it and inductor compile are kept beside the libraries.
    from tests.cuda_stub.build import LIBRARIES

    os.environ["TRITON_LIBCUDA_PATH"] = str(LIBRARIES)
    os.environ["TRITON_CACHE_DIR"] = str(FOLDER / "triton")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(FOLDER / "inductor")
    os.environ["CARD_DEVICES"] = "8"
    os.environ["CARD_VALUES"] = "1"
    import tests.cuda_stub.start  # noqa: F401

    @pytest.fixture(autouse=True)
    def nothing_compiled() -> Iterator[None]:
        """Forget compiled functions after a test: torch compiles one at most 8 times in a process."""
        yield
        import torch

        torch._dynamo.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cuda_stub)
