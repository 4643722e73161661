"""The import path of the Python processes that Triaxis starts.

`python -m` and `python -c` search the folder where they are typed first, so a `launch.py` or `torch.py` there would run in place of
ours. PYTHONSAFEPATH (`python -P`) leaves that folder out, for the process and for all that it starts. A checkout that is not
installed was perhaps found in that very folder, so its root is on PYTHONPATH. It is the last entry: a user's own package `models`
or `engine` comes before the folders of the checkout. Only another `triaxis` does not: the one that was started runs on all ranks.
"""

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from triaxis.engine.program import IMPORT_ROOT


def import_variables(variables: Mapping[str, str], root: Path = IMPORT_ROOT) -> dict[str, str]:
    """Return the variables for a Python process that imports `triaxis` wherever it is started.

    Args:
        variables: the environment that it would have.
        root: of the checkout. Site-packages are on every path already, and here they would come before the standard library.
    """
    safe = {"PYTHONSAFEPATH": "1"}
    if str(root) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return safe
    own = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", str(root))]
    place = next((place for place, entry in enumerate(own) if Path(entry, "triaxis").is_dir()), len(own))
    return safe | {"PYTHONPATH": os.pathsep.join([*own[:place], str(root), *own[place:]])}
