"""The limit of open files: raised where it can be, refused in words where a rank could not live with it."""

import resource
import subprocess
import sys

import pytest

from tests.launch.command_line import ROOT
from triaxis.launch.start.open_files import LEAST, MOST

RAISE = """\
import resource
from triaxis.launch.start.open_files import *
allow_open_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def limited(words: list[str], soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    """Run Python with limits of open files of its own."""
    command = [sys.executable, *words]
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # noqa: E731
    return subprocess.run(command, cwd=ROOT, preexec_fn=limit, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(("soft", "hard", "raised"), [(64, 300, 300), (300, 300, 300), (64, LEAST, LEAST)])
def test_the_soft_limit_is_raised_to_the_hard_one(soft: int, hard: int, raised: int) -> None:
    assert limited(["-c", RAISE], soft, hard).stdout == f"{min(raised, MOST)}\n"


def test_too_low_a_limit_starts_no_ranks() -> None:
    said = limited(
        ["-m", "triaxis.launch.cli", "train", "configs/gpt_tiny.yaml", "data.synthetic=true", "parallel.dp=1"], 24, 24
    )
    assert said.returncode == 2 and "Traceback" not in said.stderr
    assert "24 files may be open" in said.stderr and f"ulimit -n {LEAST}" in said.stderr
