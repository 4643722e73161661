"""Python's collector of cyclic garbage, run between steps, by all ranks at the same one (no torch here).

Left to itself it runs in the middle of a forward whenever enough objects were made, on each rank at another moment, and all the
others wait for that rank at their next collective. Tensors are freed by their counts, so it has little to do.
"""

import gc
from types import TracebackType


class GarbageCollection:
    """Switches the automatic collector off while it is entered; `after_step` collects.

    What lives when it is entered (modules, the model) is never looked at again until it is left.

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
        """`step` steps are made: collect if it is time."""
        if step % self._interval == 0:
            gc.collect()
