"""Stand-ins for packages that need a GPU, by folders of `tests/stand_ins` that are put on Python's path."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STAND_INS = Path(__file__).parent / "stand_ins"


def with_stand_in(rank: int, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a rank's function with the stand-in of this name; for `tests.harness.run_ranks`."""
    sys.path.insert(0, str(STAND_INS / name))
    return function(rank, *args)


@contextmanager
def stand_in(name: str, folder: Path = STAND_INS) -> Iterator[None]:
    """Have a stand-in importable in this process, within the block alone."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder / name))
    try:
        yield
    finally:
        sys.path.remove(str(folder / name))
        for module in set(sys.modules) - before:
            if str(folder / name) in str(getattr(sys.modules[module], "__file__", None)):
                del sys.modules[module]
