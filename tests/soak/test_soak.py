"""The soak itself, with few faults; its own words and exit code say whether all came out right."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import netns
from tests.launch.command_line import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ENDS = ("kill-node", "stop-rank", "nan", "preempt", "reader-ends")
OUTPUTS = ("paused-terminal", "full-log-disk", "stop-in-validation", "removed-run-dir")


@pytest.mark.parametrize("kinds", [ENDS, OUTPUTS], ids=["ends", "outputs"])
def test_one_fault_of_each_kind_comes_out_right(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    with netns.hosts(1):
        pass  # skips, with its reason, where no hosts can be made
    page, num_faults = tmp_path / "soak.md", len(kinds)
    said = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.soak",
            f"--faults={num_faults}",
            "--seed=3",
            f"--table={page}",
            "--kinds",
            *kinds,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert said.returncode == 0, f"{said.stdout}\n{said.stderr}"
    for kind in kinds:
        assert f"| {kind} |" in page.read_text()
    assert f"{num_faults} of {num_faults} faults came out right" in page.read_text()
