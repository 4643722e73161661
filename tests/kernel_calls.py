"""The calls that our kernels make of torch's operators, recorded and bound to the operators' schemas.

Our own functions make the calls. A GPU's operators get tensors without memory, on the meta device: torch checks shapes as well, and
no GPU is needed. A schema is a line of text, so those of other versions of torch bind too (`tests/torch_versions.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # an operator that imports it at its first call would find itself replaced

from triaxis.engine.config.schema.fp8 import Fp8Config
from triaxis.engine.config.values.model_choices import NORMS
from triaxis.engine.context_parallel.deal import runs_of_ranks
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.kernels.activations import ActivationKernel
from triaxis.engine.kernels.cudnn_attention import Cudnn
from triaxis.engine.kernels.flash_attention import Varlen
from triaxis.engine.kernels.fp8.products import open_fp8
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.kernels.masked_attention import CpuFlash, Kernel, Mask
from triaxis.engine.kernels.norms import NormKernel
from triaxis.engine.kernels.weight_grad import weight_grad_failure

ATEN = "torch.ops.aten."
META, CPU = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call of an operator: its name after `torch.ops.aten.`, and the arguments as our function wrote them."""

    operator: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@contextmanager
def recorded(operator: str) -> Iterator[list[Call]]:
    """Record the calls of an operator, which runs as before."""
    *path, last = operator.split(".")
    owner = reduce(getattr, path, torch.ops.aten)
    original = getattr(owner, last)
    calls: list[Call] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(Call(operator, args, kwargs))
        return original(*args, **kwargs)

    with patch.object(owner, last, record):
        yield calls


def bind(call: Call, schema: str) -> dict[str, Any]:
    """Return what the call gives each argument of a schema, by torch's own rules; defaults included.

    Raises:
        RuntimeError: torch's reason why the call does not fit.
    """
    parsed = torch._C.parse_schema(f"aten::{schema}")
    name = schema.partition("(")[0]
    found: dict[str, Any] = {}

    def take(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip((each.name for each in parsed.arguments), args, strict=False)) | kwargs
        found.update({each.name: given.get(each.name, each.default_value) for each in parsed.arguments})
        results = tuple(torch.empty(0) if str(each.type) == "Tensor" else 0 for each in parsed.returns)
        return results if len(results) > 1 else results[0]

    with torch.library._scoped_library("triaxis_bound", "FRAGMENT") as library, torch.no_grad():
        library.define(schema)
        library.impl(name, take, "CompositeExplicitAutograd")
        packet, _, overload = name.partition(".")
        getattr(getattr(torch.ops.triaxis_bound, packet), overload or "default")(*call.args, **call.kwargs)
    return found


def schema_at_hand(operator: str) -> str:
    """Return the schema of an operator in the torch that runs, as `native_functions.yaml` writes it."""
    packet, _, overload = operator.partition(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
    return str(schema).removeprefix("aten::")


def misfit(call: Call, schema: str) -> str:
    """Return why a call would mean something else by a schema of another version than by the one at hand, "" where it would not."""
    meant = bind(call, schema_at_hand(call.operator))
    try:
        found = bind(call, schema)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    # An argument that one version lacks is at its default in the other.
    moved = sorted(name for name in meant.keys() & found.keys() if not _same(meant[name], found[name]))
    lost = sorted(name for name in meant.keys() - found.keys() if meant[name] is not None)
    return f"other values of {', '.join(moved + lost)}" if moved or lost else ""


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return type(one) is type(other) and one == other


def kernel_calls() -> list[Call]:
    """Return calls of every operator that our kernels call by its name, in all their forms."""
    return [call for operator, make in MAKERS.items() for call in _made(operator, make)]


def _made(operator: str, make: Callable[[], None]) -> list[Call]:
    with recorded(operator) as calls:
        make()
    return calls


ROWS = ((5, 11), (16,))
"""Documents of two rows of 16 tokens."""


def masks(device: torch.device) -> list[Mask]:
    """Return masks with and without a window, documents and a part of each row."""
    documents = Documents.of(ROWS).map(lambda tensor: tensor.to(device))
    found = []
    for window in (None, 3):
        for given, rows in ((None, ((16,), (16,))), (documents, ROWS)):
            runs = [runs_of_ranks(row, 2, {window: 1}) for row in rows]
            part = SequencePart.of(runs, 1, rows).map(lambda tensor: tensor.to(device))
            found += [Mask(window, given), Mask(window, given, part)]
    return found


def attend_and_back(kernel: Kernel[Any], mask: Mask, dtype: torch.dtype, device: torch.device) -> list[tuple[int, ...]]:
    """Run a kernel forward and backward with 4 query and 2 key/value heads; return the shapes of out, lse and the gradients."""
    part = mask.part
    tokens = 16 if part is None else part.positions.shape[1]
    q = torch.ones(tokens, 2, 4, 8, dtype=dtype, device=device).permute(1, 2, 0, 3)
    k, v = (torch.ones(16, 2, 2, 8, dtype=dtype, device=device).permute(1, 2, 0, 3) for _ in range(2))
    out, lse = kernel.forward(q, k, v)
    return [tuple(each.shape) for each in (out, lse, *kernel.backward(torch.ones_like(out), q, k, v, out, lse))]


def _flash() -> None:
    for mask in masks(META):
        attend_and_back(gpu_kernel(mask), mask, torch.bfloat16, META)


def gpu_kernel(mask: Mask) -> Kernel[Any]:
    """Return the kernel of a GPU for a mask."""
    return Varlen(mask, 0.3)


def _cudnn() -> None:
    for mask in masks(META):
        if mask.part is not None and mask.window is None and mask.documents is None:
            attend_and_back(Cudnn(mask, 0.3), mask, torch.bfloat16, META)


def _flash_for_cpu() -> None:
    for mask in masks(CPU):
        attend_and_back(CpuFlash(mask, 0.3), mask, torch.float32, CPU)


def _activations(*names: str) -> Callable[[], None]:
    def make() -> None:
        for name in names:
            with torch.enable_grad():
                x = torch.ones(3, 8, requires_grad=True)
                ActivationKernel(name, Fusion("eager"), lambda total: None)(x).sum().backward()

    return make


def _norms(name: str, device: torch.device) -> Callable[[], None]:
    def make() -> None:
        kernel = NormKernel(name, 1e-5, Fusion("eager"))
        x, weights = torch.ones(3, 8, device=device), [torch.ones(8, device=device) for _ in NORMS[name].parameters]
        normalised, *statistics = kernel.forward(x, kernel.eps, *weights)
        kernel.backward(x, normalised, x.dtype, *weights, *statistics)

    return make


def _fused_weight_grad() -> None:
    # The trial before a run: a CPU refuses the operator after the call.
    weight_grad_failure("fused", torch.bfloat16, torch.float32, CPU)


def _scaled_gemm() -> None:
    assert open_fp8(Fp8Config(backend="torch"), torch.bfloat16, CPU) is not None


MAKERS: Mapping[str, Callable[[], None]] = {
    "_flash_attention_forward": _flash,
    "_flash_attention_backward": _flash,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn,
    "_scaled_dot_product_flash_attention_for_cpu": _flash_for_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_for_cpu,
    "gelu_backward.grad_input": _activations("gelu", "gelu_tanh", "geglu", "geglu_tanh"),
    "silu_backward.grad_input": _activations("swiglu"),
    "native_layer_norm_backward": _norms("layernorm", CPU),
    "_fused_rms_norm": _norms("rmsnorm", META),
    "_fused_rms_norm_backward": _norms("rmsnorm", META),
    "addmm.dtype_out": _fused_weight_grad,
    "_scaled_mm": _scaled_gemm,
}
"""Runs of our kernels that call an operator, by its name."""
