"""Elementwise functions, operator by operator (`eager`) or as few kernels made by torch.compile (`compiled`).

    eager      every operator reads its inputs from memory and writes its output there
    compiled   intermediate values stay in registers, so memory is passed over once or twice, not once per operator

Fused functions are pure (they may write to temporaries of their own) and contain no autograd and no communication: the forward and
the backward of a kernel are two functions. The compiler sees only them, never a model.
"""

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, Literal, TypeVar

import torch

from engine.program import pip_install

Form = Literal["eager", "compiled"]

Function = TypeVar("Function", bound=Callable[..., Any])


class Fusion:
    """The way elementwise functions run.

    Args:
        form: eager or compiled, as above.

    Attributes:
        is_compiled: the form is compiled.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self.is_compiled = form == "compiled"
        self._compiled: dict[tuple[Callable[..., Any], bool, Hashable], Callable[..., Any]] = {}

    def __call__(self, function: Function, *, any_length: bool = False, variant: Hashable = None) -> Function:
        """Return `function`, or its compiled form.

        A kernel is compiled for each shape (few: microbatches are alike), or with `any_length` one for all.

        Args:
            function: as above.
            any_length: compile it once for all lengths.
            variant: what sets the calls of one compiled form apart, such as shapes. torch compiles one function 8 times and no
                more, and asks at each call which of its forms fits; a function of many shapes is a copy for each.
        """
        if not self.is_compiled:
            return function
        key = (function, any_length, variant)
        if key not in self._compiled:
            copy = function if variant is None else _copy(function, len(self._compiled))
            self._compiled[key] = _compiled(copy, any_length)
        return self._compiled[key]  # type: ignore[return-value]


EAGER = Fusion("eager")
"""Operator by operator, for shapes that change with every call (a growing text), which would be compiled each time."""


def compiler_failure(device: torch.device) -> str:
    """Compile a small function for `device`; return the reason if that fails, else ""."""
    try:
        result = Fusion("compiled")(_trial)(torch.ones(8, device=device))
    except Exception as error:  # a missing compiler raises differently by version
        lines = (line.strip() for line in str(error).splitlines())
        return next((line for line in lines if line), type(error).__name__).rstrip(".")
    assert result.tolist() == [3.0] * 8, "the compiler made something else of x + 2"
    return ""


def compiler_refusal(device: torch.device, reason: str) -> str:
    """Return the problem of a named kernel where no compiler works for `device`."""
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
    """Return the function with code of its own, which torch counts and keeps by the code."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _compiled(function: Callable[..., Any], any_length: bool) -> Callable[..., Any]:
    # With `fullgraph` a part that cannot be compiled, or a shape too many, is an error instead of a silent slow path.
    made = torch.compile(function, fullgraph=True, dynamic=any_length)

    def call(*arguments: Any) -> Any:
        # Weights and leaves are compiled for like any other tensor: gradients are not the compiler's business.
        return made(*[value.detach() if isinstance(value, torch.Tensor) else value for value in arguments])

    return call
