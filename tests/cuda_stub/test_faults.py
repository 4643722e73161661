"""Calls of NCCL that do not match are named with both calls; a call that never ends, by torch's watchdog."""

import re
import time
from pathlib import Path

import pytest

from tests.cuda_stub.faults import make
from tests.harness import forked_ranks


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
def test_is_named(fault: str, said: str, tmp_path: Path) -> None:
    deadline, text = time.monotonic() + 60, ""
    with forked_ranks(make, 2, (fault, tmp_path), device="cuda") as (ranks, _):
        while not re.search(said, text) and time.monotonic() < deadline:
            time.sleep(0.1)
            text = "".join(path.read_text() for path in tmp_path.iterdir())
        assert re.search(said, text), text
        assert not any(rank.exitcode == 0 for rank in ranks)
