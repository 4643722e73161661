"""Shared fixtures of this folder."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for what one process writes, once for all layouts that are compared with it."""
    return tmp_path_factory.mktemp("references")
