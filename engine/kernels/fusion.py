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

from triaxis.engine.program import pip_install

Form = Literal["eager", "compiled"]

Lengths = Literal["fixed", "rows", "all"]
"""Lengths that one compiled kernel takes: its own alone, any of the first dimension, any of every dimension."""

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
        self._compiled: dict[tuple[Callable[..., Any], Lengths, Hashable], Callable[..., Any]] = {}

    def __call__(self, function: Function, *, lengths: Lengths = "fixed", variant: Hashable = None) -> Function:
        """Return `function`, or its compiled form.

        A kernel is compiled for each shape (few: microbatches are alike). Numbers that vary by call need one for all lengths.

        Args:
            function: as above.
            lengths: those that one kernel takes; rows of experts vary in the first dimension.
            variant: what sets the calls of one compiled form apart, such as shapes. torch compiles one function 8 times and no
                more, and asks at each call which of its forms fits; a function of many shapes is a copy for each.
        """
        if not self.is_compiled:
            return function
        key = (function, lengths, variant)
        if key not in self._compiled:
            # A kernel for any number of rows would also serve fixed shapes, more slowly, and be one of their 8.
            is_alone = variant is None and lengths == "fixed"
            copy = function if is_alone else _copy(function, len(self._compiled))
            self._compiled[key] = compiled(copy, lengths)
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


def compiled(function: Callable[..., Any], lengths: Lengths, **options: Any) -> Callable[..., Any]:
    """Return what torch.compile makes of a function of tensors and constants; `options` are torch.compile's."""
    # With `fullgraph` a part that cannot be compiled, or a shape too many, is an error instead of a silent slow path.
    made = torch.compile(function, fullgraph=True, dynamic=lengths == "all", **options)
    # Weights and leaves are compiled for like any other tensor: gradients are not the compiler's business.
    given = _of_any_rows if lengths == "rows" else torch.Tensor.detach

    def call(*arguments: Any) -> Any:
        return made(*[given(value) if isinstance(value, torch.Tensor) else value for value in arguments])

    return call


def _of_any_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without gradients; a kernel that is compiled for it takes any number of its rows."""
    tensor = tensor.detach()
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor
