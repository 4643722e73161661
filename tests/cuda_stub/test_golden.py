"""Full-size steps ask of the card what golden/*.txt say; `python -m tests.cuda_stub.golden NAME` writes them anew."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_stub.golden import FOLDER, NOTES, ROWS

IN_CI = ("llama_tp8",)
GIB = re.compile(r"[\d.]+(?= GiB)")


@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in IN_CI else pytest.mark.slow) for each in ROWS])
def test_a_step_asks_what_the_golden_file_says(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cuda_stub.golden", name, str(tmp_path / "calls")]
    done = subprocess.run(command, env={**os.environ, "CARD_VALUES": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = (FOLDER / f"{name}.txt").read_text().partition(NOTES)[0]
    assert GIB.sub("", done.stdout) == GIB.sub("", expected)
    found, wanted = ([float(each) for each in GIB.findall(text)] for text in (done.stdout, expected))
    assert found == pytest.approx(wanted, rel=0.015)
