"""Python's cyclic garbage collector, run between steps, on all ranks after the same one.

The automatic collector runs in the middle of a forward, on each rank at another moment, and all other ranks wait for that one in
their next collective. Tensors are freed by their reference counts, so little is left to collect.
"""

import gc
from types import TracebackType


class GarbageCollection:
    """A context with the automatic collector off; `after_step` collects.

    Objects that exist at entry (modules, the model) are excluded until exit.

    Args:
        interval: steps between collections.
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
        """Collect if it is time after `step` steps."""
        if step % self._interval == 0:
            gc.collect()
