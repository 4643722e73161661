"""Opens a profiler range for each layer's forward and backward, with the layer's name.

forward     from the layer's call to its return; in a backward too, where the forward is recomputed
backward    from the gradient of the output to that of the input, on the thread that runs autograd
"""

import re
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import record_function

LAYER = re.compile(r"layers\.\d+")
"""Names of layers: a module's attribute `name`."""


class LayerRanges:
    """Ranges of all layers that are called between `open` and `close`."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._ranges: list[tuple[str, bool, record_function]] = []

    def open(self) -> None:
        """Watch the calls of all modules from now on."""
        self._hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]

    def end(self) -> None:
        """End the open ranges."""
        while self._ranges:
            self._end()

    def close(self) -> None:
        """End the open ranges, and watch no more calls."""
        self.end()
        while self._hooks:
            self._hooks.pop().remove()

    def _enter(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if (name := _name(module)) is None:
            return
        x = given[0]
        if x.requires_grad:
            x.register_hook(lambda grad: self._end_backward(name))
        self._begin(name, is_backward=False)

    def _leave(self, module: torch.nn.Module, given: tuple[Any, ...], out: Any) -> None:
        if (name := _name(module)) is None:
            return
        if self._ranges:
            self._end()
        # Without a gradient of its input, a layer's backward has no end.
        if given[0].requires_grad and out.requires_grad:
            out.register_hook(lambda grad: self._begin_backward(name))

    def _begin_backward(self, name: str) -> None:
        # The output of one layer is the input of the next: the earlier hook, this one, runs first.
        if self._ranges and self._ranges[-1][1]:
            self._end()
        self._begin(name, is_backward=True)

    def _end_backward(self, name: str) -> None:
        if self._ranges and self._ranges[-1][:2] == (name, True):
            self._end()

    def _begin(self, name: str, *, is_backward: bool) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._ranges.append((name, is_backward, opened))

    def _end(self) -> None:
        self._ranges.pop()[2].__exit__(None, None, None)


def _name(module: torch.nn.Module) -> str | None:
    name = getattr(module, "name", None)
    return name if isinstance(name, str) and LAYER.fullmatch(name) else None
