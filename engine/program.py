"""Builds the command lines that messages offer.

    triaxis("train run.yaml")  ->  triaxis train run.yaml                                  the command is on the path
                                   .venv/bin/triaxis train run.yaml                        the command is beside this Python
                                   PYTHONPATH=checkout python -m triaxis.launch.cli train run.yaml  the command is not installed
    install("text")            ->  python -m pip install -e 'checkout[text]'
    pip_install("triton")      ->  python -m pip install triton

The lines can be typed in the folder where this process was started. `tests/conventions/test_offered_commands.py` runs each whole
command line in a message. A message that only names a command (`triaxis verify`) puts the name in backticks.
"""

import os
import shlex
import shutil
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Folder with engine/, models/, launch/ and configs/: a checkout, or the installed package."""

IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()

IMPORT_ROOT = ROOT if IS_CHECKOUT else ROOT.parent
"""Folder to put on the import path so that `triaxis` can be imported: a checkout, or site-packages."""

NAME = "triaxis"


def triaxis(words: str) -> str:
    """Build the command line that runs `triaxis WORDS` in the shell that started this process.

    Args:
        words: arguments, already quoted for a shell; words in capitals are placeholders for the user to replace.
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
    """Build the command line that installs an extra from pyproject.toml for this Python.

    No package index has this project, so the line names the checkout. Without a checkout, the line lists the extra's requirements.

    Args:
        extra: the extra's name.
        options: options for pip.
    """
    if IS_CHECKOUT:
        what = ["-e", f"{ROOT}[{extra}]"]
    else:
        needed = metadata.requires(NAME) or []
        what = [one.partition(";")[0].strip() for one in needed if f'extra == "{extra}"' in one]
    return pip_install(*options, *what)


def pip_install(*words: str) -> str:
    """Build the command line that installs `words` with pip for this Python."""
    return shlex.join([short(Path(sys.executable)), "-m", "pip", "install", *words])


def version() -> str:
    """Read this project's version from pyproject.toml, or without a checkout from the installed package."""
    if IS_CHECKOUT:
        return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
    return metadata.version(NAME)


def short(path: Path) -> str:
    """Make a path relative if it lies below the current folder. Other paths are returned as given."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
