"""Command lines that messages offer, as they can be typed where this process was started.

    triaxis("train run.yaml")  ->  triaxis train run.yaml                                  the command is on the path
                                   .venv/bin/triaxis train run.yaml                        it is beside this Python
                                   PYTHONPATH=checkout python -m triaxis.launch.cli train run.yaml  it is not installed
    install("text")            ->  python -m pip install -e 'checkout[text]'
    pip_install("triton")      ->  python -m pip install triton

A message that offers a whole line takes it from here; `tests/conventions/test_offered_commands.py` runs each of them. A message
that only names a command (`triaxis verify`) has the name in backticks.
"""

import os
import shlex
import shutil
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds engine/, models/, launch/ and configs/: a checkout, or the installed package."""

IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()

IMPORT_ROOT = ROOT if IS_CHECKOUT else ROOT.parent
"""The folder that has `triaxis` on the import path: a checkout, or site-packages."""

NAME = "triaxis"


def triaxis(words: str) -> str:
    """Return the line that runs `triaxis WORDS` in the shell that started this process.

    Args:
        words: quoted for a shell. Words in capitals are for the user to replace.
    """
    beside = Path(sys.executable).with_name(NAME)
    if shutil.which(NAME):
        program = NAME
    elif beside.is_file():
        program = shlex.quote(short(beside))
    else:
        program = f"PYTHONPATH={shlex.quote(str(IMPORT_ROOT))} {shlex.quote(sys.executable)} -m triaxis.launch.cli"
    return f"{program} {words}"


def install(extra: str, *options: str) -> str:
    """Return the line that installs an extra of pyproject.toml for this Python. (No package index has this project.)

    Args:
        extra: its name.
        options: for pip.
    """
    if IS_CHECKOUT:
        what = ["-e", f"{ROOT}[{extra}]"]
    else:
        needed = metadata.requires(NAME) or []
        what = [one.partition(";")[0].strip() for one in needed if f'extra == "{extra}"' in one]
    return pip_install(*options, *what)


def pip_install(*words: str) -> str:
    """Return the line with which pip installs `words` for this Python."""
    return shlex.join([short(Path(sys.executable)), "-m", "pip", "install", *words])


def version() -> str:
    """Return the version of this project; a checkout need not be installed."""
    if IS_CHECKOUT:
        return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
    return metadata.version(NAME)


def short(path: Path) -> str:
    """Return the path as seen from the current folder, where it leads down from it."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
