"""Set the import path for Python processes that Triaxis starts.

PYTHONSAFEPATH excludes the current folder, where a `torch.py` would hide the real module.

The checkout's root goes on PYTHONPATH as the last entry, so that a user's own package `models` or `engine` comes before ours. But
the root precedes any entry with another `triaxis`, so that all ranks run the copy that was started.
"""

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from triaxis.engine.program import IMPORT_ROOT


def import_variables(variables: Mapping[str, str], root: Path = IMPORT_ROOT) -> dict[str, str]:
    """Return the variables for a Python process that imports `triaxis` from any folder.

    Args:
        variables: environment that the process would otherwise have.
        root: checkout root; not added if it is site-packages, which Python searches anyway.
    """
    safe = {"PYTHONSAFEPATH": "1"}
    if str(root) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return safe
    own = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", str(root))]
    place = next((place for place, entry in enumerate(own) if Path(entry, "triaxis").is_dir()), len(own))
    return safe | {"PYTHONPATH": os.pathsep.join([*own[:place], str(root), *own[place:]])}
