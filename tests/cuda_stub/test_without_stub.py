"""What an environment without the stub says of these tests."""

import pytest


def test_the_program_for_gpus() -> None:
    pytest.skip("these tests run on a stub of CUDA: bash tests/run.sh --cuda-stub")
