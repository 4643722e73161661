"""The import path of the Python processes that Triaxis starts (no torch here).

`python -m` and `python -c` search the folder where they are typed first, so a `launch.py` or `torch.py` there would run in place of
ours. PYTHONSAFEPATH (`python -P`) leaves that folder out, for the process and for all that it starts. A checkout that is not
installed was perhaps found in that very folder, so its root goes to the front of PYTHONPATH; the user's own entries follow.
"""

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds `launch`, `models` and `engine`: a checkout, or site-packages."""


def import_variables(variables: Mapping[str, str], root: Path = ROOT) -> dict[str, str]:
    """Return the variables for a Python process that imports `launch` wherever it is started.

    Args:
        variables: the environment that it would have.
        root: of the checkout. Site-packages are on every path already, and in front they would come before the standard library.
    """
    safe = {"PYTHONSAFEPATH": "1"}
    if str(root) in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return safe
    own = variables.get("PYTHONPATH", "")
    if own.split(os.pathsep)[0] == str(root):
        return safe | {"PYTHONPATH": own}
    return safe | {"PYTHONPATH": os.pathsep.join([str(root), *([own] if own else [])])}
