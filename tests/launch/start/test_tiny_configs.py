"""The tiny configs prepare their corpus, and take their layout from the environment."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch.start import launcher

WHERE_TO_STOP = 7
"""The code with which the stand-in for `triaxis prepare` ends."""


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the corpora that were prepared, from a folder without any."""
    paths: list[str] = []

    def prepare(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        paths.append(command[command.index("--output") + 1])
        return subprocess.CompletedProcess(command, WHERE_TO_STOP)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher.subprocess, "run", prepare)
    return paths


@pytest.mark.parametrize("path", launcher.TINY_CONFIGS, ids=lambda path: path.stem)
def test_a_tiny_config_prepares_its_corpus(path: Path, prepared: list[str]) -> None:
    assert launcher.launch(launcher.Request(path, (), trains=True), {}) == WHERE_TO_STOP
    assert prepared == ["data/stdlib/bytes"]


def test_other_data_is_left_alone(prepared: list[str]) -> None:
    """Neither data that an override names nor another program's run is prepared."""
    stops = {"preflight": lambda config, path: "seen"}
    own = launcher.Request(launcher.DEFAULT_CONFIG, ("data.tokenizer=bytes",), trains=True, **stops)
    other = launcher.Request(launcher.DEFAULT_CONFIG, (), worker="launch.footprint.traffic", **stops)
    assert [launcher.launch(request, {}) for request in (own, other)] == [0, 0]
    assert prepared == []


def test_the_environment_deals_out_experts() -> None:
    path = launcher.DEFAULT_CONFIG.with_name("moe_tiny.yaml")
    sizes = launcher.make_plan(launcher.Request(path, ()), {"EP": "2", "ETP": "2"}).sizes
    assert (sizes.ep, sizes.etp, sizes.world_size) == (2, 2, 8)
