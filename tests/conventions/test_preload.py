"""Ranks of tests start from a server that has imported what they need (`tests/preload.py`)."""

import gc

import pytest

from tests.harness import run_ranks


def objects_from_the_server(rank: int) -> int:
    return gc.get_freeze_count()


@pytest.mark.distributed
def test_the_fork_server_has_imported_everything() -> None:
    """A failed import is not reported, and each rank of each test would import for itself; the last line freezes."""
    (frozen,) = run_ranks(objects_from_the_server, 1)
    assert frozen > 0, "tests/preload.py did not come to its end: python -c 'import tests.preload' says why"
