"""The soak itself, with few faults; its own words and exit code say whether all came out right."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import netns
from tests.launch.command_line import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

KINDS = ("kill-node", "stop-rank", "nan", "preempt", "reader-ends")


def test_faults_of_five_kinds_come_out_right(tmp_path: Path) -> None:
    with netns.hosts(1):
        pass  # skips, with its reason, where no hosts can be made
    page = tmp_path / "soak.md"
    said = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--faults=5", "--seed=3", f"--table={page}", "--kinds", *KINDS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert said.returncode == 0, f"{said.stdout}\n{said.stderr}"
    for kind in KINDS:
        assert f"| {kind} |" in page.read_text()
    assert "5 of 5 faults came out right" in page.read_text()
