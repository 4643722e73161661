"""Runs Python's cyclic garbage collector between steps, on all ranks after the same step.

The automatic collector would run on each rank at a different moment, while all other ranks wait in a collective. Tensors are freed
by reference counts, so little is left to collect.
"""

import gc
from types import TracebackType


class GarbageCollection:
    """Context manager that switches off automatic garbage collection; `after_step` collects instead.

    Objects that exist at entry are not examined until exit.

    Args:
        interval: number of steps from one collection to the next.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._was_enabled = False

    def __enter__(self) -> "GarbageCollection":
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Collect if `step`, the number of completed steps, is a multiple of the interval."""
        if step % self._interval == 0:
            gc.collect()
