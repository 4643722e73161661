"""The rule for a test on a machine that lacks something it needs: root, a program, a package.

It skips with the reason and with what installs the thing. Where `TRIAXIS_CI=strict`, as `.ci/run` sets it, it fails: there
everything was installed, and a skip would hide that nothing was tested. `CI=true` alone, as most services set it, changes nothing.
Only tests marked `gpu` skip everywhere.
"""

import importlib.util
import os
from typing import NoReturn

import pytest

VARIABLE = "TRIAXIS_CI"
STRICT = "strict"


def is_strict() -> bool:
    """Say if a test may not skip here."""
    return os.environ.get(VARIABLE) == STRICT


def give_up(reason: str) -> NoReturn:
    """Skip the test that runs, or fail it where skipping is not allowed.

    Args:
        reason: what is missing and how it is installed.
    """
    if is_strict():
        pytest.fail(reason)
    pytest.skip(reason)


def need_package(name: str, install: str) -> None:
    """Give up where a package is missing; it is not imported."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        give_up(f"{name} is not installed: {install}")


def skip_where(is_missing: bool, reason: str) -> pytest.MarkDecorator:
    """Mark a test that skips where something is missing, and runs into the lack where skipping is not allowed."""
    return pytest.mark.skipif(is_missing and not is_strict(), reason=reason)
