"""Calls Transformer Engine's GEMM (`general_gemm`, cuBLASLt) for the linear layers.

    forward                 Y  = X W^T (+ bias)    layout TN, A = W [out, in], B = X [n, in]
    gradient of the input   dX = dY W              layout NN, A = W [out, in], B = dY [n, out]
    gradient of the weight  dW (+)= dY^T X         layout NT, A = X [n, in],   B = dY [n, out], out = main grad

cuBLAS is column-major, so its first operand A is the right factor of the row-major product. The layout's first letter refers to A.
T contracts A along dim 1, N along dim 0. Operands and `out` are contiguous. The third GEMM adds in the main grad's dtype. With FP8
operands (`engine/kernels/fp8`) every GEMM is Y = P Q^T, in layout TN with A = Q, B = P.

TE's modules are not used. They would start collectives that the communication ledger (`engine/comm/ledger.py`) cannot record.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from triaxis.engine.kernels.fp8.recipes import Quantised
from triaxis.engine.kernels.te_storage import Storages, open_storages
from triaxis.engine.kernels.trial import failure, first_line
from triaxis.engine.program import install

FIRST_VERSION = "2.10"
"""First release whose `general_gemm` takes these arguments; earlier ones need a workspace from the caller."""


class OtherVersionError(ImportError):
    """The error for a Transformer Engine release whose `general_gemm` has an incompatible signature."""


class GeneralGemm(Protocol):
    """The arguments of `transformer_engine.pytorch.cpp_extensions.general_gemm` that are used here."""

    def __call__(
        self,
        A: Any,  # noqa: N803 (TE's names)
        B: Any,  # noqa: N803
        *,
        out_dtype: torch.dtype | None = None,
        accumulate: bool = False,
        layout: str = "TN",
        out: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        use_split_accumulator: bool = False,
        grad: bool = False,
    ) -> Sequence[torch.Tensor | None]: ...


@dataclass(frozen=True, slots=True)
class TransformerEngine:
    """GEMMs by an installed Transformer Engine.

    Attributes:
        general_gemm: TE's function, which returns (out, bias gradient, GELU input, extra output).
        dot_product_attention: constructor for TE's attention module (`te_attention.py`).
        storages: TE's classes for FP8 matrices.
        version: package version.
    """

    general_gemm: GeneralGemm
    dot_product_attention: Callable[..., Any]
    storages: Storages
    version: str

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute X W^T + bias [n, out]; x [n, in], weight [out, in], bias [out]."""
        return _first(self.general_gemm(weight, x, layout="TN", out_dtype=x.dtype, bias=bias))

    def input_grad(self, grad: torch.Tensor, weight: torch.Tensor, onto: torch.Tensor | None = None) -> torch.Tensor:
        """Compute dY W [n, in]; grad [n, out], weight [out, in]. If `onto` [n, in] is given, add to it in place."""
        gemm = partial(self.general_gemm, weight, grad, layout="NN", out_dtype=grad.dtype, grad=True)
        return _first(gemm() if onto is None else gemm(out=onto, accumulate=True))

    def add_weight_grad(
        self,
        main_grad: torch.Tensor,
        grad: torch.Tensor,
        x: torch.Tensor,
        *,
        overwrite: bool,
        with_total: bool,
    ) -> torch.Tensor | None:
        """Add dY^T X to main_grad [out, in], or assign it if `overwrite`.

        `grad` is dY [n, out], `x` is X [n, in].

        Returns:
            dY summed over tokens, [out] in the main grad's dtype, if `with_total`; else None.
        """
        gemm = partial(self.general_gemm, x, grad, layout="NT", out_dtype=main_grad.dtype, out=main_grad, grad=True)
        # TE uses only this bias's presence, length and dtype, not its values.
        _, total, *_ = gemm(accumulate=not overwrite, bias=main_grad[:, 0] if with_total else None)
        return total

    def fp8_product(
        self,
        a: Quantised,
        b: Quantised,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        is_tensorwise: bool,
        is_fast: bool = False,
    ) -> torch.Tensor:
        """Compute a b^T + bias [m, n] in `dtype`; a [m, k], b [n, k], bias [n].

        `is_tensorwise`: a and b have one scale each; else block scales. `is_fast`: sums may be shorter than fp32.
        """
        operands = (self.storages.stored(one, is_tensorwise=is_tensorwise) for one in (b, a))
        return _first(self.general_gemm(*operands, out_dtype=dtype, bias=bias, use_split_accumulator=not is_fast))

    def add_fp8_product(
        self, total: torch.Tensor, a: Quantised, b: Quantised, *, overwrite: bool, is_tensorwise: bool
    ) -> None:
        """Add a b^T to total [m, n], or assign it if `overwrite`; sums are in `total`'s dtype."""
        operands = (self.storages.stored(one, is_tensorwise=is_tensorwise) for one in (b, a))
        self.general_gemm(
            *operands, out_dtype=total.dtype, out=total, accumulate=not overwrite, use_split_accumulator=True
        )


def _first(returned: Sequence[torch.Tensor | None]) -> torch.Tensor:
    out = returned[0]
    assert out is not None, "general_gemm returns its output"
    return out


def open_te() -> TransformerEngine:
    """Import Transformer Engine and check that its `general_gemm` takes the arguments passed here.

    Raises:
        ImportError: Transformer Engine is not installed, cannot be imported, or takes other arguments.
    """
    try:
        function = import_module("transformer_engine.pytorch.cpp_extensions").general_gemm
        version = import_module("transformer_engine").__version__
        if lacking := _lacking(function):
            raise OtherVersionError(
                f"general_gemm of transformer-engine {version} takes other arguments ({lacking}); "
                f"{FIRST_VERSION} is the first that fits"
            )
        attention = import_module("transformer_engine.pytorch.attention").DotProductAttention
        storages = open_storages()
    except OtherVersionError:
        raise
    except Exception as error:  # its import loads CUDA libraries and may raise any type
        raise ImportError(_reason(error)) from error
    return TransformerEngine(function, attention, storages, version)


def gemm_failure(dtype: torch.dtype, main_grad_dtype: torch.dtype, device: torch.device) -> str:
    """Try a layer's three GEMMs on small matrices.

    Returns:
        The reason if a GEMM does not run or is wrong, else "".
    """

    def run() -> None:
        te, generator = open_te(), torch.Generator().manual_seed(1)
        x, weight, bias, grad, main_grad = (
            torch.randn(*shape, generator=generator).to(device, dtype)
            for shape in ((32, 16), (48, 16), (48,), (32, 48), (48, 16))
        )
        main_grad = main_grad.to(main_grad_dtype)
        _compare("output", te.forward(x, weight, bias), F.linear(x, weight, bias))
        _compare("gradient of the input", te.input_grad(grad, weight, onto=x.clone()), x + grad @ weight)
        expected = main_grad + grad.t() @ x
        of_bias = te.add_weight_grad(main_grad, grad, x, overwrite=False, with_total=True)
        _compare("gradient of the weight", main_grad, expected)
        _compare("gradient of the bias", of_bias, grad.sum(0))

    return failure(run)


def _compare(name: str, found: torch.Tensor | None, expected: torch.Tensor) -> None:
    if found is None or not (found - expected).norm() < 0.02 * expected.norm():
        raise RuntimeError(f"its {name} is not torch's")


def gemm_refusal(dtype: torch.dtype, device: torch.device, reason: str) -> str:
    """Write the config error for `kernels.linear = te` on a device where it does not run."""
    return (
        f"kernels.linear = te does not run here, in {str(dtype).removeprefix('torch.')} on {device.type} ({reason}). Another GEMM "
        f"would have other speed and other bits than what was asked for. {how_to_install()} kernels.linear=torch runs anywhere."
    )


def how_to_install() -> str:
    """Build a sentence with the command that installs Transformer Engine."""
    line = install("te", "--no-build-isolation")
    return f"Beside a torch with CUDA and its compiler,  {line}  installs Transformer Engine (docs/cluster.md)."


def _lacking(function: Callable[..., Any]) -> str:
    """Describe how `function`'s parameters differ from `GeneralGemm`: the missing and the additional required ones; else ""."""
    wanted = [name for name in inspect.signature(GeneralGemm.__call__).parameters if name != "self"]
    found = inspect.signature(function).parameters
    missing = [name for name in wanted if name not in found]
    required = [
        name for name, parameter in found.items() if parameter.default is parameter.empty and name not in ("A", "B")
    ]
    words = [f"no {name}" for name in missing] + [f"a {name} that the caller must bring" for name in required]
    return ", ".join(words)


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "transformer_engine":
        return "the package transformer-engine is not installed"
    return f"transformer-engine is installed and cannot be imported: {first_line(error)}"
