"""Triton code of one function for a GPU that is not here: written by inductor, run on tensors without memory, assembled by ptxas.

    function, shapes  ->  a graph by tracing on the CPU, up to inductor's own compiler  ->  every tensor moves to `cuda`
                      ->  inductor writes Triton kernels and the Python that launches them
                      ->  that Python runs on meta tensors: each launch, and the tensors that it is given
                      ->  triton compiles each kernel in every configuration that inductor would measure; ptxas counts registers

Nothing is launched. What needs a card stays unknown: which configuration is the fastest, and any time.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch.utils import _triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from benchmarks.gpu_code.cards import CARDS, Card, pretended
from benchmarks.gpu_code.cases import cases
from benchmarks.gpu_code.step import FusedCall, TensorSpec, record_step
from benchmarks.gpu_code.table import GpuCode
from benchmarks.host_calls import is_view
from triaxis.engine.kernels.inductor import CompiledFunction

CUDA = torch.device("cuda", 0)


class _WrittenError(Exception):
    """The end of a compilation: the code is written, and there is no GPU to run it."""


@dataclass(frozen=True, slots=True)
class _Code:
    """Python that launches kernels, and its arguments: sizes that vary, and tensors without memory."""

    source: str
    arguments: list[Any]


@dataclass(slots=True)
class _Kernel:
    """A Triton kernel in the Python that launches it: launches are counted, and nothing runs.

    Attributes:
        name, source: as inductor wrote them.
        parameters: of the kernel, pointers first.
        launches, num_bytes: counted.
    """

    name: str
    source: str
    parameters: tuple[str, ...]
    launches: int = 0
    num_bytes: int = 0

    def run(self, *arguments: Any, **options: Any) -> None:
        """Count a launch and the tensors that it is given."""
        self.launches += 1
        for parameter, value in zip(self.parameters, arguments, strict=False):
            if isinstance(value, torch.Tensor):
                self.num_bytes += _num_bytes(value) * (2 if parameter.startswith("in_out") else 1)


class _Operators(TorchDispatchMode):
    """A counter of torch's own operators between kernels; each tensor that one is given or returns is moved once."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not is_view(func):
            self.launches += 1
            self.num_bytes += _num_bytes((args, kwargs, result))
        return result


class Compiler:
    """A compiler of functions for one card. Use it in a process of its own (`pretended`)."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._target = GPUTarget("cuda", card.arch, 32)
        target = self._target
        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: target,
                get_current_device=lambda: 0,
                get_active_torch_device=lambda: CUDA,
            )
        )
        # The assembler's own report goes to the standard output, once for each compilation.
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True
        # It was asked for, and answered no, before there was a card.
        _triton.has_triton.cache_clear()
        with pretended(card):
            assert _triton.has_triton()

    def compile(self, call: FusedCall) -> GpuCode:
        """Compile the function of a call for its shapes; of any length, with the call's as an example."""
        code = self._write(call)
        with pretended(self._card):
            kernels, operators = _launched(code)
            used = [list(self._assembled(kernel)) for kernel in kernels]
        each = [sizes for of_kernel in used for sizes in of_kernel]
        return GpuCode(
            name=call.function.__name__,
            key=call.key,
            elements=call.elements,
            argument_bytes=_num_bytes(code.arguments),
            launches=sum(kernel.launches for kernel in kernels) + operators.launches,
            num_bytes=sum(kernel.num_bytes for kernel in kernels) + operators.num_bytes,
            operators=operators.launches,
            configurations=len(each),
            spilling=sum(spills > 0 for _, spills in each),
            registers=max((registers for registers, _ in each), default=0),
            spills=sum(min(spills for _, spills in of_kernel) for of_kernel in used),
        )

    def _write(self, call: FusedCall) -> _Code:
        """Have inductor write the code, by the way that `Fusion` takes."""
        found: list[_Code] = []
        compile_inner = compile_fx.compile_fx_inner

        def inner(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
            with pretended(self._card):
                moved = _moved(graph, inputs)
                sizes = [_size(each) for each in inputs]

                def written(lowered: GraphLowering) -> Any:
                    source, _ = lowered.codegen()
                    found.append(_Code(source.value, sizes))
                    return SimpleNamespace(call=lambda arguments: ())

                with patch.object(GraphLowering, "compile_to_module", written):
                    compile_inner(graph, moved, **options)
            raise _WrittenError

        arguments = tree_map(lambda each: each.empty() if isinstance(each, TensorSpec) else each, call.arguments)
        # Not found in a cache: there its code would not be written.
        with (
            inductor_config.patch(fx_graph_cache=False, compile_threads=1),
            patch.object(compile_fx, "compile_fx_inner", inner),
            suppress(_WrittenError),
        ):
            CompiledFunction(call.function, call.lengths)(*arguments)
        (code,) = found
        return code

    def _assembled(self, kernel: _Kernel) -> Iterator[tuple[int, int]]:
        """Compile a kernel in each configuration; yield the registers of a thread, and the bytes that spill."""
        tuner = getattr(PyCodeCache.load(kernel.source), kernel.name)
        for configuration in tuner.configs:
            meta = tuner._create_compile_meta(configuration)
            source = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
            options = tuner._create_compile_options(configuration, meta)
            with redirect_stdout(StringIO()) as log:
                triton.compile(source, target=self._target, options=options)
            (registers,) = re.findall(r"Used (\d+) registers", log.getvalue())
            spills = re.findall(r"(\d+) bytes spill", log.getvalue())
            yield int(registers), sum(map(int, spills))


def functions_of(card: str) -> list[GpuCode]:
    """Compile every function that the cases run on a card, of any length the longest; in a process of its own."""
    calls: dict[str, FusedCall] = {}
    for config in cases():
        if CARDS[card].has_fp8 or config.precision.fp8 is None:
            for call in record_step(config):
                if call.key not in calls or call.elements > calls[call.key].elements:
                    calls[call.key] = call
    compiler = Compiler(CARDS[card])
    return [compiler.compile(call) for call in calls.values()]


def _num_bytes(values: Any) -> int:
    """Count the bytes of all tensors in a tree, an expanded dim once."""
    total = 0
    for tensor in tree_iter(values):
        if isinstance(tensor, torch.Tensor):
            sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
            total += math.prod(sizes) * tensor.element_size()
    return total


def _moved(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Move the inputs of a graph to the GPU, with the tensors that it makes; a fake tensor moves by its name alone."""
    mode = detect_fake_mode(inputs)
    assert mode is not None, "inductor is given fake tensors"

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=CUDA)

    moved = [move(each) for each in inputs]
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", CUDA)
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, value in zip(places, moved, strict=True):
        node.meta["val"] = value
    graph.recompile()
    return moved


def _size(value: Any) -> Any:
    """Return an argument of the written code: a number, or a tensor without memory in the sizes of the example."""
    if not isinstance(value, torch.Tensor):
        return int(value)
    shape, stride = (tuple(map(int, each)) for each in (value.size(), value.stride()))
    return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")


def _launched(code: _Code) -> tuple[list[_Kernel], _Operators]:
    """Run the Python that launches kernels, on tensors without memory."""
    kernels: list[_Kernel] = []

    def kernel(compiling: AsyncCompile, name: str, source: str, *others: Any, **options: Any) -> _Kernel:
        tuner = getattr(PyCodeCache.load(source), name)
        kernels.append(_Kernel(name, source, tuple(tuner.fn.arg_names)))
        return kernels[-1]

    def empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    names: dict[str, Any] = {"__name__": "written"}
    with patch.object(AsyncCompile, "triton", kernel), patch.object(AsyncCompile, "wait", lambda *others: None):
        exec(compile(code.source, "<written by inductor>", "exec"), names)
    names["empty_strided_cuda"] = empty
    names["reinterpret_tensor"] = lambda tensor, shape, stride, offset=0: empty(shape, stride, tensor.dtype)
    names["copy_if_misaligned"] = lambda tensor: tensor
    with _Operators() as operators:
        names["call"](list(code.arguments))
    return kernels, operators
