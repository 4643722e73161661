"""`-p times` counts the seconds of processes that outlive the ones that started them, and keeps pytest's exit code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = Path(__file__).with_name("plugins")

TEST = """
import subprocess, sys
def test_an_orphan():
    start = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', ''])"
    subprocess.run([sys.executable, "-c", start])
def test_a_failure():
    raise AssertionError
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_an_orphan_is_counted_and_a_failure_stays_one(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    words = [sys.executable, "-m", "pytest", "-p", "times", "-n", "0", "-q", str(tmp_path / "test_it.py")]
    made = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": str(PLUGINS)}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert made.returncode == 1 and "1 failed, 1 passed" in made.stdout
    counted = r"[\d.]+ s user \+ [\d.]+ s system in .* \(1 orphans\), \d+% of the CI tier's cap of [\d,]+ s"
    assert re.fullmatch(counted, made.stdout.splitlines()[-1])
