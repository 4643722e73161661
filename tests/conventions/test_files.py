"""Files contain no name of a package registry and no path of one machine, and stay small enough to read."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = {"__pycache__", ".venv", "runs", "data", "build"}
MAX_LINES = 500

# Written in pieces, so that this file does not contain what it forbids.
FORBIDDEN = {
    "a registry host": re.compile(
        r"(?:pypi|pythonhosted|npmjs|anaconda|crates|rubygems)\.(?:org|com|io)\b"
        r"|(?:download\.py" r"torch|deb\.deb" r"ian|archive\.ubu" r"ntu|proxy\.gol" r"ang)\.",
        re.IGNORECASE,
    ),
    "a way around the configured registry": re.compile(r"--(?:extra-)?index" r"-url|--find" r"-links"),
    "a path of one machine": re.compile(r"(?:^|[\s\"'=(`])/(?:wo" r"rk|root|home/\w+|opt/ve" r"nv\w*)/"),
}  # fmt: skip


@cache
def project_files() -> list[Path]:
    """Every text file of the project; caches and what a run leaves behind are not part of it."""
    return list(_project_files())


def _project_files() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = [part for part in parts if part.startswith(".") and part not in (".ci", ".gitignore", ".github")]
        generated = parts[0] in GENERATED or "__pycache__" in parts or any(part.endswith(".egg-info") for part in parts)
        if (
            path.is_file()
            and not hidden
            and not generated
            and path.suffix not in (".png", ".so", ".safetensors", ".bin", ".idx")
        ):
            yield path


def findings(text: str) -> list[str]:
    return [
        f"{number}: {what}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        if pattern.search(line)
    ]


def test_nothing_forbidden_is_in_the_project():
    files = project_files()
    assert ROOT / "README.md" in files
    assert ROOT / ".ci" / "run" in files
    found = [f"{path.relative_to(ROOT)}:{row}" for path in files for row in findings(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "pip install -i https://py" + "pi.org/simple torch",
        "URL = 'https://files.python" + "hosted.org/packages'",
        "pip install --index" + "-url x",
        "deb http://deb.deb" + "ian.org/debian bookworm main",
        "cd /wo" + "rk/main",
        'PATH = "/home/' + 'somebody/triaxis"',
    ],
)
def test_what_is_forbidden_is_found(line):
    assert findings(line)


@pytest.mark.parametrize(
    "line", ["pip install torch", "see arxiv.org/abs/2104.04473", "runs/work/main", "#!/usr/bin/env bash"]
)
def test_the_rest_is_allowed(line):
    assert not findings(line)


def test_files_are_small_enough_to_read():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in project_files()
        if path.suffix == ".py" and (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long, f"longer than {MAX_LINES} lines: {long}; is each still one idea?"


OWN_TEXT = {
    "engine/program.py": "pyproject.toml of this checkout",
    "launch/verify/subject/triaxis_subject.py": "the job that verify has written; it imports nothing of ours",
    "launch/prepare/prepare.py": "a digest that it has written",
    "engine/device/nvidia_driver.py": "/proc",
    "launch/doctor/facts.py": "/proc",
    "launch/doctor/limits.py": "/proc",
    "launch/doctor/measure.py": "a file that it has written",
    "launch/inference/request.py": "the job that the command has written",
    "launch/start/bootstrap.py": "files of this checkout; it imports nothing of ours",
    "launch/tuning/calibrate.py": "seconds that its own process has written",
    "launch/tuning/layouts.py": "the log of a run that it has started",
    "engine/device/host_memory.py": "/sys",
    "launch/tuning/report.py": "/proc",
    "launch/verify/run.py": "records of its own runs",
    "launch/verify/verdict/records.py": "records of its own runs",
}
"""Modules that read text which no user has put there."""


def test_a_users_text_is_read_by_one_bounded_reader():
    """`engine.storage.state_files.read_text`: a FIFO would be waited for, and a device read without end."""
    found = {
        str(path.relative_to(ROOT))
        for top in ("engine", "models", "launch")
        for path in (ROOT / top).rglob("*.py")
        if ".read_text(" in path.read_text()
    }
    assert found == OWN_TEXT.keys()
