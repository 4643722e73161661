"""Imports optional packages that only some inputs need, and explains an import that fails."""

import importlib
from typing import Any

from triaxis.engine.errors import DataError
from triaxis.engine.program import install


def need(package: str, purpose: str) -> Any:
    """Import an optional package or one of its submodules.

    Args:
        package: import name.
        purpose: phrase for what needs it, used as the subject of the error message.

    Raises:
        DataError: the package cannot be imported.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise DataError(
            f"{purpose} needs the package {name}, which cannot be imported here ({error}). Install it with  "
            f"{install('text')}"
        ) from error
