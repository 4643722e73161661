"""One step of one rank on tensors without memory: each function that passes `Fusion`, with its arguments' shapes and dtypes.

The engine runs as on a GPU (`kernels.elementwise`, `optimizer` compiled, `weight_grad` fused), on fake CPU tensors, so attention is
the CPU's. No list of functions is kept: what goes through `Fusion` is here.
"""

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter, tree_map

from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes, rank_grid
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.kernels.fp8.products import Fp8
from triaxis.engine.kernels.fp8.recipes import recipe_of
from triaxis.engine.kernels.fusion import Fusion, Lengths
from triaxis.engine.kernels.registry import DeviceFacts, Kernels, resolve
from triaxis.engine.numerics.precision import FP8_E4M3, FP8_E5M2
from triaxis.engine.train import build
from triaxis.launch.footprint.routing import counts_in_turn, know_rows, known_rows
from triaxis.launch.footprint.run import assumed_rows, fake_world, microbatches
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

AS_ON_A_GPU = {
    "kernels.attention": "auto",
    "kernels.elementwise": "compiled",
    "kernels.weight_grad": "fused",
    "kernels.optimizer": "compiled",
}
CPU = torch.device("cpu")

DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.float32: "f32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.bool: "bool",
    torch.uint8: "u8",
    FP8_E4M3: "e4m3",
    FP8_E5M2: "e5m2",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's shape, strides and dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def empty(self) -> torch.Tensor:
        """Return such a tensor on the CPU. Nothing touches its memory, so the system gives it none."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def text(self, lengths: Lengths) -> str:
        """Return it as `bf16[4096, 2, 128]`, with strides where it is not contiguous, and `n` for any length."""
        name = DTYPE_NAMES[self.dtype]
        if lengths != "fixed":
            fixed = self.shape[1:] if lengths == "rows" else ()
            sizes = ["n"] * (len(self.shape) - len(fixed)) + [str(size) for size in fixed]
            return f"{name}[{', '.join(sizes)}]"
        is_contiguous = torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()
        return f"{name}{list(self.shape)}" + ("" if is_contiguous else f" strides {list(self.stride)}")


@dataclass(frozen=True, slots=True, eq=False)
class FusedCall:
    """A call of a function through `Fusion`.

    Attributes:
        arguments: with a `TensorSpec` in place of each tensor.
        lengths: those that one compiled form takes.
        site: the function of the engine that made the call: (file, qualified name).
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    lengths: Lengths
    site: tuple[str, str]

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    @property
    def key(self) -> str:
        """Return the name of what is compiled: calls with equal keys run the same kernels."""
        return f"{self.name}({', '.join(self._text(each) for each in self.arguments)})"

    @property
    def elements(self) -> int:
        """Return the number of elements of the largest tensor argument."""
        return max(each.numel for each in tree_iter(self.arguments) if isinstance(each, TensorSpec))

    def _text(self, argument: Any) -> str:
        if isinstance(argument, TensorSpec):
            return argument.text(self.lengths)
        if isinstance(argument, list | tuple):
            return f"[{', '.join(map(self._text, argument))}]"
        if isinstance(argument, bool | int | float | None):
            return repr(argument)
        if isinstance(argument, torch.dtype):
            return DTYPE_NAMES[argument]
        return argument.__name__ if callable(argument) else type(argument).__name__


@contextmanager
def recorded(calls: list[FusedCall]) -> Iterator[None]:
    """Let any `Fusion` return functions that add their calls to a list, and run as they are written."""

    def record(
        fusion: Fusion, function: Callable[..., Any], *, lengths: Lengths = "fixed", variant: Hashable = None
    ) -> Callable[..., Any]:
        caller = sys._getframe(1).f_code
        site = caller.co_filename, caller.co_qualname

        def call(*arguments: Any) -> Any:
            specs = tree_map(lambda each: TensorSpec.of(each) if isinstance(each, torch.Tensor) else each, arguments)
            calls.append(FusedCall(function, specs, lengths, site))
            return function(*arguments)

        return call

    with patch.object(Fusion, "__call__", record):
        yield


def record_step(config: Config) -> list[FusedCall]:
    """Run a step of rank 0 on fake tensors, all microbatches, and return the calls of fused functions, in order.

    Args:
        config: of the run; `parallel.dp` is given.
    """
    for key, choice in AS_ON_A_GPU.items():
        config = with_value(config, key, choice)
    grid, model = rank_grid(config, sizes := parallel_sizes(config)), config.model
    choices = resolve(config.kernels, DeviceFacts.of(config, CPU))
    # Rows of experts are counted with values, so before the tensors have none.
    known = None
    if model.has_experts:
        known = known_rows(counts_in_turn(config, grid, 0, assumed_rows(config)), grid, 0)
    calls: list[FusedCall] = []
    with fake_world(0, sizes.world_size), FakeTensorMode(allow_non_fake_inputs=True), recorded(calls):
        topology = Topology(grid, 0, CPU, kv_heads=model.kv_heads, has_experts=model.has_experts)
        fp8 = None if config.precision.fp8 is None else Fp8(recipe_of(config.precision.fp8), "torch")
        kernels = Kernels(choices, Fusion("compiled"), fp8)
        engine = build(
            resolve_recompute(config, topology.sizes),
            topology,
            build_chunks,
            fill=lambda parameters, seed: None,
            kernels=kernels,
        )
        if known is not None:
            know_rows(engine, known)
        batches = microbatches(engine)
        losses = engine.forward_backward(batches)
        engine.update(losses, lr=1e-3)
        engine.buffers.wait_all()
        topology.close()
    return calls
