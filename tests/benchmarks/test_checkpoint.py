"""The benchmark of checkpoints runs, measures what it says, and leaves nothing behind (counted, never timed)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.command_line import ROOT

pytestmark = pytest.mark.distributed


def test_a_toy_run(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    words = ["-m", "benchmarks.checkpoint", "--gib", "0.01", "--rounds", "2", "--folder", str(folder)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = subprocess.run(
        [*launcher, *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    rows = re.findall(r"│ (\w+(?: \w+)?) +│ +([\d.]+) │ +([\d.]+) │ +([\d.]*) │", said.stdout)
    names = [name for name, *_ in rows]
    writing, reading = ["dd write", "our save", "dcp save"], ["dd read", "our load", "our begin", "dcp load"]
    assert names == [*writing, *reading, "copy", "our stop", "dcp stop"]
    assert [name for name, _, _, ratio in rows if not ratio] == ["dd write", "dd read", "copy"]
    # One layer of h = 1024 and a byte vocabulary, 12 bytes a parameter.
    assert "0.15 GiB in 2 files, medians of 2 rounds" in said.stdout
    assert not folder.exists()
