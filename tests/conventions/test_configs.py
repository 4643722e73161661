"""Every configs/*.yaml is legal at the world size that it names, and at half of it.

As it stands: `test_config.py` and `test_schedule.py` of `tests/launch/commands/`.
"""

import re
from pathlib import Path

import pytest

from triaxis.launch import cli

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
ON_A_CPU = ("gpt_tiny", "moe_tiny")
"""Their dp is given."""
LONG_PIPELINES = ("gpt_530b", "gpt_1t", "deepseek_v3")
"""Hundreds of thousands of actions each, which the checker walks."""
LONG_ENOUGH = (*LONG_PIPELINES, "gpt_175b", "llama3_405b")
"""Two seconds and more, at one world size."""


def cases(slow):
    return [pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem in slow else ()) for path in CONFIGS]


def published_world_size(path):
    """From the first line of a config: `world size 64`, or `8 ranks` where it is meant for a CPU."""
    heading = path.read_text().splitlines()[0]
    found = re.search(r"world size (\d+)", heading) or re.search(r"(\d+) ranks", heading)
    assert found is not None, f"{path.name} does not begin with the world size that it is meant for: {heading}"
    return int(found[1])


@pytest.mark.parametrize("path", cases(LONG_PIPELINES))
def test_at_the_published_world_size(path, capsys, monkeypatch):
    world_size = published_world_size(path)
    for command in ("config check", "schedule check"):
        assert cli.main([*command.split(), str(path), "--gpus", str(world_size)]) == 0, capsys.readouterr().err
    capsys.readouterr()
    for name, value in {
        "CUDA_VISIBLE_DEVICES": "",
        "NNODES": max(1, world_size // 8),
        "NODE_RANK": 0,
        "NPROC_PER_NODE": min(8, world_size),
        "MASTER_ADDR": "node0",
    }.items():
        monkeypatch.setenv(name, str(value))
    assert cli.main(["train", str(path), "--dry-run"]) == 0, capsys.readouterr().err
    assert f"{world_size} on " in capsys.readouterr().out


@pytest.mark.parametrize("path", cases(LONG_ENOUGH))
def test_a_config_fits_other_numbers_of_gpus(path, capsys):
    world_size = published_world_size(path) // 2
    changes = ["parallel.dp=null"] if path.stem in ON_A_CPU else []
    assert cli.main(["config", "check", str(path), "--gpus", str(world_size), *changes]) == 0, capsys.readouterr().err


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
