"""The benchmark of checkpoints runs, measures what it says, and leaves nothing behind (counted, never timed).

One small rank without a launcher; in the slow tier two ranks of the size that a command has.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import checkpoint
from tests.launch.command_line import ROOT


def check(said: str, size: str) -> None:
    rows = re.findall(r"│ (\w+ \w+) +│ +([\d.]+) │ +([\d.]+) │ +([\d.]+) │", said)
    assert [name for name, *_ in rows] == [
        f"{side} {kind}" for kind in ("save", "load") for side in ("dd", "our", "dcp")
    ]
    assert [ratio for name, _, _, ratio in rows if name.startswith("dd")] == ["1.00", "1.00"]
    assert f"{size}, medians of 2 rounds" in said


def test_one_small_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "HIDDEN", 128)
    monkeypatch.setenv("COLUMNS", "120")
    folder = tmp_path / "disk"
    assert checkpoint.main(["--gib", "0.001", "--rounds", "2", "--folder", str(folder)]) == 0
    check(capsys.readouterr().out, "0.00 GiB in 1 file")
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
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
    # One layer of h = 1024 and a byte vocabulary, 12 bytes a parameter.
    check(said.stdout, "0.15 GiB in 2 files")
    assert not folder.exists()
