"""The import path for Python processes that Triaxis starts.

`python -m` and `python -c` search the current folder first, so a `launch.py` or `torch.py` there would run in place of
ours. PYTHONSAFEPATH (`python -P`) excludes that folder, for the process and everything it starts. An uninstalled checkout may
have been found through that very folder, so its root goes on PYTHONPATH. It is the last entry: a user's own package `models`
or `engine` comes before the checkout's folders. But our root precedes any entry with another `triaxis`, so that all ranks run the
one that was started.
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
        root: checkout root. Site-packages are not added: they are on every path already, and would precede the standard library.
    """
    safe = {"PYTHONSAFEPATH": "1"}
    if str(root) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return safe
    own = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", str(root))]
    place = next((place for place, entry in enumerate(own) if Path(entry, "triaxis").is_dir()), len(own))
    return safe | {"PYTHONPATH": os.pathsep.join([*own[:place], str(root), *own[place:]])}
