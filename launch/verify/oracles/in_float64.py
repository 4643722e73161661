"""Run other libraries' code in float64, even where it asks for fp32.

Other libraries' models ask for fp32 in norms and softmax. Each such request becomes a request for float64.
"""

from collections.abc import Callable
from typing import Any

import torch


class InFloat64(torch.overrides.TorchFunctionMode):
    """A context that creates float64 tensors where fp32 or no dtype is requested."""

    def __enter__(self) -> Any:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._before)

    def __torch_function__(
        self, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        args = tuple(_wider(one) for one in args)
        return function(*args, **{name: _wider(one) for name, one in (kwargs or {}).items()})


def _wider(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument
