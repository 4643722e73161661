"""One step of one rank on tensors without memory: each function that passes `Fusion`, and each operator that runs by itself.

    Fusion.__call__  ->  the function with its arguments' shapes, strides and dtypes     a compiled kernel on a GPU
    all else         ->  `benchmarks.gpu_code.eager`                                     an operator on a GPU

The engine runs as on a GPU (`kernels.elementwise`, `optimizer` compiled, `weight_grad` fused), on fake CPU tensors, so attention is
the CPU's. No list of functions is kept: what goes through `Fusion` is here.
"""

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from benchmarks.gpu_code.eager import Product, is_attention, is_work, moved_bytes, product_of
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.plan import parallel_sizes, rank_grid
from triaxis.engine.config.section import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.head import cross_entropy, logits
from triaxis.engine.kernels.fp8.products import Fp8
from triaxis.engine.kernels.fp8.recipes import recipe_of
from triaxis.engine.kernels.fusion import Fusion, Lengths
from triaxis.engine.kernels.registry import DeviceFacts, Kernels, resolve
from triaxis.engine.numerics.precision import FP8_E4M3, FP8_E5M2
from triaxis.engine.optimizer import distributed
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

Part = Literal["elementwise", "cross-entropy", "optimizer"]
PARTS: tuple[Part, ...] = ("elementwise", "cross-entropy", "optimizer")

LOSS_MODULES = (cross_entropy.__name__, logits.__name__)

DTYPE_NAMES = {
    torch.bfloat16: "bf16",
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

    @property
    def part(self) -> Part:
        """Return the part of a step that it belongs to."""
        module = self.function.__module__
        if module.startswith("triaxis.engine.optimizer."):
            return "optimizer"
        return "cross-entropy" if module in LOSS_MODULES else "elementwise"

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


@dataclass(slots=True)
class Moved:
    """Bytes and launches of operators."""

    bytes: int = 0
    launches: int = 0


@dataclass(slots=True)
class StepRecord:
    """Work of one step.

    Attributes:
        calls: each call through `Fusion`, in order.
        eager: operators that run by themselves, by part; neither products nor attention.
        products: GEMMs and how often each ran.
        attentions: launches of fused attention.
    """

    calls: list[FusedCall] = field(default_factory=list)
    eager: Mapping[Part, Moved] = field(default_factory=lambda: {part: Moved() for part in PARTS})
    products: Counter[Product] = field(default_factory=Counter)
    attentions: int = 0

    @property
    def elements(self) -> Counter[str]:
        """Return the elements that each key's calls work on."""
        found: Counter[str] = Counter()
        for call in self.calls:
            found[call.key] += call.elements
        return found

    @property
    def counts(self) -> Counter[str]:
        """Return how often each key is called."""
        return Counter(call.key for call in self.calls)


class _Recorder(TorchDispatchMode):
    """A recorder of the operators in its context, and of the fused functions that a model is given in `fusing`."""

    def __init__(self, vocabulary: Sequence[int]) -> None:
        super().__init__()
        self.record = StepRecord()
        self.is_update = False
        self._vocabulary = vocabulary
        self._depth = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._depth or not is_work(func):
            return result
        product = product_of(func, args)
        if product is not None:
            self.record.products[product] += 1
        elif is_attention(func):
            self.record.attentions += 1
        else:
            moved = self.record.eager[self._part(args)]
            moved.bytes += moved_bytes(func, args, kwargs or {}, result)
            moved.launches += 1
        return result

    def _part(self, args: Sequence[Any]) -> Part:
        """Return the part of an operator: logits are what has a column per word."""
        if self.is_update:
            return "optimizer"
        tensors = (each for each in tree_iter(args) if isinstance(each, torch.Tensor))
        has_logits = any(each.dim() > 1 and each.shape[-1] in self._vocabulary for each in tensors)
        return "cross-entropy" if has_logits else "elementwise"

    @contextmanager
    def fusing(self) -> Iterator[None]:
        """Let any `Fusion` return functions that record their calls, and run as they are written."""
        recorder = self

        def record(
            fusion: Fusion, function: Callable[..., Any], *, lengths: Lengths = "fixed", variant: Hashable = None
        ) -> Callable[..., Any]:
            caller = sys._getframe(1).f_code
            site = caller.co_filename, caller.co_qualname

            def call(*arguments: Any) -> Any:
                specs = tree_map(
                    lambda each: TensorSpec.of(each) if isinstance(each, torch.Tensor) else each, arguments
                )
                recorder.record.calls.append(FusedCall(function, specs, lengths, site))
                recorder._depth += 1
                try:
                    return function(*arguments)
                finally:
                    recorder._depth -= 1

            return call

        with patch.object(Fusion, "__call__", record):
            yield


def record_step(config: Config) -> StepRecord:
    """Run a step of rank 0 on fake tensors, all microbatches, and return its work.

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
    recorder = _Recorder((model.vocab_size, model.padded_vocab_size // sizes.tp))
    # As on a GPU, where one operator squares a whole bucket.
    whole = {"cpu": distributed.DOT_NUMEL["cuda"]}
    with (
        fake_world(0, sizes.world_size),
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder.fusing(),
        patch.object(distributed, "DOT_NUMEL", whole),
    ):
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
        with recorder:
            losses = engine.forward_backward(batches)
            recorder.is_update = True
            engine.update(losses, lr=1e-3)
            engine.buffers.wait_all()
        topology.close()
    return recorder.record
