"""Runs ranks with a bug planted in them, and fails where the bug's code never ran: then nothing was tested."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from tests.harness import run_ranks

Plant = Callable[[], None]
"""Puts functions of its own in the place of others."""


def run_planted(
    plant: Plant | None,
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    must_run: bool = True,
    **options: Any,
) -> list[Any]:
    """`run_ranks` with `plant` called first in each rank; without one it is `run_ranks`.

    `must_run`: each function that the plant defines is called on some rank, or an error names it.
    """
    if plant is None:
        return run_ranks(function, world_size, *args, **options)
    own = frozenset(_names_in(plant.__code__)) if must_run else frozenset()
    found = run_ranks(_rank_with, world_size, plant, own, function, args, **options)
    never = own.difference(*(called for called, _ in found))
    assert not never, f"the bug {plant.__name__} was never there: no rank called {', '.join(sorted(never))}"
    return [result for _, result in found]


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of functions that are written inside of one; comprehensions are parts of theirs."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_name == "<lambda>" or not inner.co_name.startswith("<"):
                yield inner.co_qualname
            yield from _names_in(inner)


def _rank_with(
    rank: int, plant: Plant, own: frozenset[str], function: Callable[..., Any], args: Sequence[Any]
) -> tuple[set[str], Any]:
    """(functions of the plant that were called, result)."""
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_qualname in own:
            called.add(frame.f_code.co_qualname)
        if called >= own:
            sys.setprofile(None)

    threading.setprofile(note)
    sys.setprofile(note)
    plant()
    return called, function(rank, *args)
