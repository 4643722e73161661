"""Recognise errors that a process's environment causes.

The causes are modules on PYTHONPATH that hide others, and too little memory.
"""

import errno
import os
import resource
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

from triaxis.engine.program import IMPORT_ROOT


def named_environment(error: BaseException) -> str | None:
    """Describe how the environment made a command fail, and the remedy; None if the error has another cause."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM or _not_mapped(error):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        bound = "this machine or its container has no more"
        if limit != resource.RLIM_INFINITY:
            bound = f"`ulimit -v` allows {limit // 1024:,} kB"
        return (
            f"there is too little memory for this command: {bound}. Raise the limit, or free memory, and type it again."
        )
    if not any(frame.f_code.co_name == "<module>" for frame, _ in traceback.walk_tb(error.__traceback__)):
        return None
    own = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", str(IMPORT_ROOT))]
    if not (hidden := _hidden(own, [entry for entry in sys.path if entry not in own])):
        return None
    return (
        f"{', '.join(hidden)}: imported in place of the installed package of that name, since its folder is on PYTHONPATH; an "
        f"import failed with {type(error).__name__}: {error}. Rename it, or take the folder out of PYTHONPATH."
    )


def _not_mapped(error: BaseException) -> bool:
    return isinstance(error, ImportError) and "failed to map segment" in str(error)


def _hidden(own: Sequence[str], others: Sequence[str]) -> list[str]:
    """List the files in the folders `own` that hide other modules.

    The hidden modules are in the folders `others`, and belong to the standard library or to installed packages.
    """
    known = sys.stdlib_module_names | packages_distributions().keys()
    found = []
    for folder in own:
        names = {entry.name.partition(".")[0] for entry in Path(folder).iterdir()} if Path(folder).is_dir() else set()
        for name in sorted(names & known):
            spec = PathFinder.find_spec(name, [folder])
            if _is_module(spec) and _is_module(PathFinder.find_spec(name, others)):
                assert spec is not None
                found.append(str(spec.origin))
    return found


def _is_module(spec: ModuleSpec | None) -> bool:
    """Whether importing the module would run a file. A folder without `__init__.py` hides no other module."""
    return spec is not None and spec.origin is not None
