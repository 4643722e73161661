"""Runs elementwise functions operator by operator, or compiled to few kernels.

    eager      every operator reads its inputs from memory and writes its output there
    compiled   inductor, torch's compiler, keeps intermediate values in registers, so there are only one or two passes over memory

The functions contain no autograd and no communication, and write only to their own temporaries. A kernel's forward and backward are
two separate functions.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from triaxis.engine.kernels import inductor
from triaxis.engine.kernels.inductor import CompiledFunction, Lengths
from triaxis.engine.kernels.trial import failure
from triaxis.engine.program import pip_install

Form = Literal["eager", "compiled"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Fusion:
    """A wrapper that runs elementwise tensor functions as they are, or compiled by torch.

    Args:
        form: `eager`, one kernel per operator; or `compiled`, few kernels, by inductor.

    Attributes:
        is_compiled: whether the form is `compiled`.
        compile_seconds: seconds that each compiled graph took.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self.is_compiled = form == "compiled"
        self.compile_seconds: list[float] = []
        self._compiled: dict[tuple[Callable[..., Any], Lengths], Callable[..., Any]] = {}
        self._tables: dict[tuple[Any, ...], Any] = {}

    def __call__(self, function: Function, *, lengths: Lengths = "fixed") -> Function:
        """Return `function`, or its compiled form.

        Args:
            function: pure function of tensors and constants, without autograd and communication.
            lengths: lengths that one compiled kernel accepts: `fixed`, a single shape; `rows`, any first dim, as expert rows need;
                `all`, any length in every dim.
        """
        if not self.is_compiled:
            return function
        key = (function, lengths)
        if key not in self._compiled:
            self._compiled[key] = CompiledFunction(function, lengths, self.compile_seconds.append)
        return self._compiled[key]  # type: ignore[return-value]

    def bind(self, function: Callable[..., Any], *arguments: Any, lengths: Lengths = "fixed") -> Callable[[], Any]:
        """Return a call of `function`, or of its compiled form, with arguments whose tensors keep their memory."""
        form: Any = self(function, lengths=lengths)
        # A form that others wrapped is called as any function.
        return form.bound(*arguments) if isinstance(form, inductor.CompiledFunction) else partial(form, *arguments)

    def table(self, function: Callable[..., Any], *constants: Any) -> Any:
        """Return what `function` makes of constants: tensors that compiled functions read, made once."""
        if not self.is_compiled:
            return function(*constants)
        key = (function, *constants)
        if key not in self._tables:
            self._tables[key] = function(*constants)
        return self._tables[key]


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
        f"kernels.elementwise or kernels.optimizer is `compiled`, and torch's inductor makes no kernel for {device.type} "
        f"here (torch says: {reason}). It needs {needed}a C++ compiler and Python's headers "
        "(apt-get install g++ python3-dev). kernels.elementwise=eager and kernels.optimizer=torch run anywhere, more "
        "slowly on a GPU."
    )


def _trial(x: torch.Tensor) -> torch.Tensor:
    return x + 2
