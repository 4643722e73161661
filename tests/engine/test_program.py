"""Command lines of messages fit the place where the program was started."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from triaxis.engine import program

ROOT = Path(__file__).resolve().parents[2]
Made = Callable[[str], Path]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Make an executable below a folder that becomes the current one; there is none on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def make(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
        path.chmod(0o755)
        return path

    return make


def test_on_the_path_it_is_a_word(made: Made) -> None:
    made("bin/triaxis")
    assert program.triaxis("train a.yaml") == "triaxis train a.yaml"


def test_beside_this_python_it_is_a_path(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(made("my venv/bin/python")))
    made("my venv/bin/triaxis")
    line = program.triaxis("train 'a b.yaml'")
    assert line == "'my venv/bin/triaxis' train 'a b.yaml'"
    ran = subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, check=True)
    assert ran.stdout == "train|a b.yaml|"


def test_not_installed_it_runs_from_the_checkout(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    python = sys.executable
    monkeypatch.setattr(program.Path, "is_file", lambda path: False)
    line = program.triaxis("--version")
    assert line == f"PYTHONPATH={ROOT} {python} -m triaxis.launch.cli --version"
    shown = subprocess.run(["/bin/sh", "-c", line], cwd="/", capture_output=True, text=True, check=True).stdout
    assert shown.startswith("triaxis ") and f" in {ROOT}, torch " in shown


def test_an_extra_is_installed_from_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert program.install("text") == f"{sys.executable} -m pip install -e '{ROOT}[text]'"


def test_without_a_checkout_an_extra_is_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index has the project: its name would install somebody else's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "IS_CHECKOUT", False)
    monkeypatch.setattr(program.metadata, "requires", lambda name: ["torch>=2.9", 'pyarrow>=15; extra == "text"', "x"])
    assert program.install("text") == f"{sys.executable} -m pip install 'pyarrow>=15'"


def test_the_version_is_that_of_the_project() -> None:
    assert program.version() == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
