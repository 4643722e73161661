"""Every configs/*.yaml is legal as it stands: `triaxis config check` and `triaxis schedule check` accept it."""

from pathlib import Path

import pytest

from launch import cli

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_check(path, capsys):
    assert cli.main(["config", "check", str(path)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_schedule_check(path, capsys):
    assert cli.main(["schedule", "check", "--config", str(path)]) == 0, capsys.readouterr().err


def test_there_are_configs():
    assert ROOT / "configs" / "gpt_tiny.yaml" in CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_line_of_a_config_is_explained(path):
    bare = [
        f"{number}: {line}"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.startswith(" ") and line.strip() and "#" not in line
    ]
    assert not bare, f"lines of {path.name} without a comment:\n" + "\n".join(bare)
