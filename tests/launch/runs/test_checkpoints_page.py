"""The commands of docs/checkpoints.md, run as they are written, in order, in one folder."""

import subprocess
from pathlib import Path

import pytest

from tests.documented import ROOT, commands, make_workplace, section

pytestmark = [pytest.mark.distributed, pytest.mark.slow]  # two minutes; what the commands do is tested apart


def test_saving_resuming_and_converting_as_the_page_says(tmp_path: Path) -> None:
    lines = list(commands(section((ROOT / "docs" / "checkpoints.md").read_text(), "## The commands")))
    environment = make_workplace(tmp_path)
    said = []
    for line in lines:
        shown = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert shown.returncode == 0, f"{line}\n{shown.stdout}\n{shown.stderr}"
        assert shown.stdout.strip(), f"{line} said nothing"
        said.append(shown.stdout)
    first, longer, other_layout = said[:3]
    assert "resuming" not in first and "saved step 20" in first
    assert "resuming after step 20" in longer and "differs from the saved run" not in longer
    assert "resuming after step 30" in other_layout and "tp 2 -> 1" in other_layout
    assert (tmp_path / "imported" / "demo").is_dir()
