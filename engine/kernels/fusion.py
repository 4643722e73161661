"""Runs elementwise functions operator by operator, or compiled to few kernels.

    eager      every operator reads its inputs from memory and writes its output there
    compiled   torch.compile keeps intermediate values in registers, so there are only one or two passes over memory

The functions contain no autograd and no communication, and write only to their own temporaries. A kernel's forward and backward are
two separate functions.
"""

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, Literal, TypeVar

import torch

from triaxis.engine.kernels.trial import failure
from triaxis.engine.program import pip_install

Form = Literal["eager", "compiled"]

Lengths = Literal["fixed", "rows", "all"]
"""Lengths that one compiled kernel accepts: a single shape, any first dim, or any length in every dim."""

Function = TypeVar("Function", bound=Callable[..., Any])


class Fusion:
    """A wrapper that runs elementwise tensor functions as they are, or compiled by torch.

    Args:
        form: `eager`, one kernel per operator; or `compiled`, few kernels, by torch.compile.

    Attributes:
        is_compiled: whether the form is `compiled`.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self.is_compiled = form == "compiled"
        self._compiled: dict[tuple[Callable[..., Any], Lengths, Hashable], Callable[..., Any]] = {}

    def __call__(self, function: Function, *, lengths: Lengths = "fixed", variant: Hashable = None) -> Function:
        """Return `function`, or its compiled form.

        Args:
            function: pure function of tensors, without autograd and communication.
            lengths: lengths that one compiled kernel accepts: `fixed`, a single shape; `rows`, any first dim, as expert rows need;
                `all`, any length in every dim.
            variant: key for a separate compiled copy, such as the shapes. torch compiles one function at most 8 times, so a
                function with many shapes needs one copy per shape.
        """
        if not self.is_compiled:
            return function
        key = (function, lengths, variant)
        if key not in self._compiled:
            # On a shared function, a kernel for any rows would also serve fixed shapes, more slowly, and use up one of the 8.
            is_alone = variant is None and lengths == "fixed"
            copy = function if is_alone else _copy(function, len(self._compiled))
            self._compiled[key] = compiled(copy, lengths)
        return self._compiled[key]  # type: ignore[return-value]


EAGER = Fusion("eager")
"""Eager runner for shapes that change with every call (a growing text) and would otherwise be compiled each time."""


def compiler_failure(device: torch.device) -> str:
    """Compile a small function for `device`; return the reason if that fails, else ""."""

    def run() -> None:
        if Fusion("compiled")(_trial)(torch.ones(8, device=device)).tolist() != [3.0] * 8:
            raise RuntimeError("the compiler made something else of x + 2")

    return failure(run)


def compiler_refusal(device: torch.device, reason: str) -> str:
    """Write the config error for `compiled` kernels when no compiler works for `device`."""
    needed = "" if device.type == "cpu" else f"triton  {pip_install('triton')}  and "
    return (
        f"kernels.elementwise or kernels.optimizer is `compiled`, and torch.compile makes no kernel for {device.type} "
        f"here (torch says: {reason}). It needs {needed}a C++ compiler and Python's headers "
        "(apt-get install g++ python3-dev). kernels.elementwise=eager and kernels.optimizer=torch run anywhere, more "
        "slowly on a GPU."
    )


def _trial(x: torch.Tensor) -> torch.Tensor:
    return x + 2


def _copy(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Copy a function with its own code object, by which torch counts and caches compiled forms."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def compiled(function: Callable[..., Any], lengths: Lengths, **options: Any) -> Callable[..., Any]:
    """Compile a function of tensors and constants; `options` are torch.compile's."""
    # With `fullgraph`, uncompilable code or a ninth shape raises an error instead of taking a silent slow path.
    made = torch.compile(function, fullgraph=True, dynamic=lengths == "all", **options)
    # Tensors are detached so that torch.compile neither compiles weights and other leaves separately nor traces autograd.
    given = _of_any_rows if lengths == "rows" else torch.Tensor.detach

    def call(*arguments: Any) -> Any:
        return made(*[given(value) if isinstance(value, torch.Tensor) else value for value in arguments])

    return call


def _of_any_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor and mark dim 0 dynamic."""
    tensor = tensor.detach()
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor
