"""Packages that only some text needs."""

import importlib
from typing import Any

from triaxis.engine.errors import DataError
from triaxis.engine.program import install


def need(package: str, purpose: str) -> Any:
    """Import an optional package, which may be a submodule.

    Args:
        package: as it is imported.
        purpose: what needs it, as the subject of a sentence.

    Raises:
        DataError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise DataError(
            f"{purpose} needs the package {name}, which cannot be imported here ({error}). Install it with  "
            f"{install('text')}"
        ) from error
