"""Calls of NCCL that do not match are named with both calls; a call that never ends, by torch's watchdog."""

import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("fault", "said"),
    {
        "order": r"all_reduce of 8 x fp32, .*all_gather of 8 x fp32|all_gather of 8 x fp32, .*all_reduce of 8 x fp32",
        "size": r"all_reduce of 4 x fp32, .*all_reduce of 5 x fp32|of 5 x fp32, .*of 4 x fp32",
        "dtype": r"8 x fp32, .*8 x bf16|8 x bf16, .*8 x fp32",
        "message": r"(?i)watchdog caught collective operation timeout.*OpType=SEND",
        "group": r"(?i)watchdog caught collective operation timeout.*OpType=ALLREDUCE",
    }.items(),
)
def test_is_named(fault: str, said: str) -> None:
    command = [sys.executable, "-m", "tests.cuda_stub.faults", fault]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and not done.stdout, done.stdout
    assert re.search(said, done.stderr), done.stderr
