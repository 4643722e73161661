"""Kernels with a backward of their own, against autograd through torch's functions: operator by operator, and compiled."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.harness import compiler
from triaxis.engine.config.schema.layer_kinds import Rotary
from triaxis.engine.config.values.model_choices import ACTIVATIONS, NORMS, Activation, Norm
from triaxis.engine.kernels.activations import ActivationKernel
from triaxis.engine.kernels.dropout import keyed_dropout, keyed_hash
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.kernels.norms import NormKernel
from triaxis.engine.kernels.rotary import apply_rope, rope_tables, rotary_frequencies

EPS = 1e-5

Function = Callable[..., torch.Tensor]
Kernel = Callable[..., torch.Tensor]
"""A function whose last argument is the fusion."""

FREQUENCIES = rotary_frequencies(Rotary(8, 1e4, scaling=None, is_long=False), torch.float64, torch.device("cpu"))
TABLES = rope_tables(torch.arange(6).expand(3, 6), FREQUENCIES)
KEYS = torch.tensor([5, -7, 11]).view(1, 3, 1)
POSITIONS = torch.arange(6).view(-1, 1, 1) * 16 + torch.arange(16)
FACTOR = (keyed_hash(KEYS, POSITIONS) >= int(0.3 * 2**32)).double() / 0.7


def swiglu(x: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    return ActivationKernel("swiglu", fusion)(x)


def plain_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu_tanh(x: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    return ActivationKernel("geglu_tanh", fusion)(x)


def plain_geglu_tanh(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def geglu(x: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    return ActivationKernel("geglu", fusion)(x)


def plain_geglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def relu2(x: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    return ActivationKernel("relu2", fusion)(x)


def plain_relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def norm_1p(x: torch.Tensor, weight: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    return NormKernel("rmsnorm_1p", EPS, fusion)(x, weight)


def plain_norm_1p(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, weight.shape, 1 + weight.to(wide.dtype), EPS).to(x.dtype)


def norm(x: torch.Tensor, weight: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    return NormKernel("rmsnorm", EPS, fusion)(x, weight)


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def centred_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    return NormKernel("layernorm", EPS, fusion)(x, weight, bias)


def plain_centred_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def rope(x: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    wide = x.dtype if x.dtype == torch.float64 else torch.float32
    return apply_rope(x, TABLES.to(x.device, wide), fusion)


def plain_rope(x: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + d/2) as complex numbers, times exp(i angle)."""
    wide = x if x.dtype == torch.float64 else x.float()
    angles = torch.arange(6.0, dtype=torch.float64).view(-1, 1, 1, 1) * 1e4 ** -(
        torch.arange(4.0, dtype=torch.float64) / 4
    )
    turn = torch.polar(torch.ones_like(angles), angles).to(x.device)
    turned = torch.complex(*wide.chunk(2, dim=-1)) * turn
    return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)


def dropped(x: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    return keyed_dropout(x, None, KEYS.to(x.device), POSITIONS.to(x.device), 0.3, fusion)


def plain_dropped(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR.to(x.device, x.dtype)


def dropped_on(x: torch.Tensor, residual: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    return keyed_dropout(x, residual, KEYS.to(x.device), POSITIONS.to(x.device), 0.3, fusion)


def plain_dropped_on(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return residual + plain_dropped(x)


KERNELS = [
    pytest.param(swiglu, plain_swiglu, [(6, 3, 16)], id="swiglu"),
    pytest.param(geglu_tanh, plain_geglu_tanh, [(6, 3, 16)], id="geglu_tanh"),
    pytest.param(geglu, plain_geglu, [(6, 3, 16)], id="geglu"),
    pytest.param(relu2, plain_relu2, [(6, 3, 16)], id="relu2"),
    pytest.param(norm_1p, plain_norm_1p, [(6, 3, 16), (16,)], id="rms_norm_1p"),
    pytest.param(norm, plain_norm, [(6, 3, 16), (16,)], id="rms_norm"),
    pytest.param(norm, plain_norm, [(5, 1, 4, 8), (8,)], id="rms_norm of heads"),
    pytest.param(centred_norm, plain_centred_norm, [(6, 3, 16), (16,), (16,)], id="layer_norm"),
    pytest.param(rope, plain_rope, [(6, 3, 4, 8)], id="rope"),
    pytest.param(dropped, plain_dropped, [(6, 3, 16)], id="dropout"),
    pytest.param(dropped_on, plain_dropped_on, [(6, 3, 16), (6, 3, 16)], id="dropout on a residual"),
]
COMPILED_IN_CI = ("swiglu", "rms_norm", "layer_norm", "rope", "dropout on a residual")
"""One of each kind: gated, a sum over a row, two of them, pairs of elements, a hash."""

of_kernels = pytest.mark.parametrize(("ours", "plain", "shapes"), KERNELS)


def inputs(shapes: list[tuple[int, ...]], dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device) for shape in shapes]
    # Tokens come transposed: samples first in memory, with whatever stride a dimension of size 1 has.
    made[0] = made[0].transpose(0, 1).contiguous().transpose(0, 1)
    return [value.requires_grad_() for value in made]


def run(function: Function, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients for a gradient of the output that is the same for every function."""
    output = function(*given)
    grad = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view(output.shape).to(output)
    return [output.detach(), *torch.autograd.grad(output, given, grad)]


def is_exact(ours: Kernel, plain: Function, shapes: list[tuple[int, ...]], form: str, device: str) -> None:
    """In float64 to rounding."""
    given = inputs(shapes, torch.float64, device)
    for one, other in zip(run(partial(ours, fusion=Fusion(form)), given), run(plain, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def is_near(ours: Kernel, plain: Function, shapes: list[tuple[int, ...]], form: str, device: str) -> None:
    """In bf16 no further from the truth than torch is."""
    given = inputs(shapes, torch.bfloat16, device)
    exact = run(plain, [value.detach().double().requires_grad_() for value in given])
    for mine, torchs, true in zip(
        run(partial(ours, fusion=Fusion(form)), given), run(plain, given), exact, strict=True
    ):
        assert mine.dtype == torch.bfloat16
        assert (mine - true).norm() <= 1.05 * (torchs - true).norm()


@pytest.mark.parametrize(
    ("ours", "plain", "shapes", "form"),
    [pytest.param(*kernel.values, "eager", id=f"{kernel.id}-eager") for kernel in KERNELS]
    + [
        pytest.param(
            *kernel.values,
            "compiled",
            id=f"{kernel.id}-compiled",
            marks=[compiler(), *([] if kernel.id in COMPILED_IN_CI else [pytest.mark.slow])],
        )
        for kernel in KERNELS
    ],
)
def test_outputs_and_gradients_are_those_of_plain_torch(
    ours: Kernel, plain: Function, shapes: list[tuple[int, ...]], form: str
) -> None:
    is_exact(ours, plain, shapes, form, "cpu")


@pytest.mark.parametrize("form", ["eager", pytest.param("compiled", marks=[compiler(), pytest.mark.slow])])
@of_kernels
def test_in_bf16_no_further_from_the_truth_than_plain_torch(
    ours: Kernel, plain: Function, shapes: list[tuple[int, ...]], form: str
) -> None:
    is_near(ours, plain, shapes, form, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["eager", "compiled"])
@of_kernels
def test_those_of_a_gpu_are_those_of_plain_torch(
    ours: Kernel, plain: Function, shapes: list[tuple[int, ...]], form: str
) -> None:
    is_exact(ours, plain, shapes, form, "cuda")
    is_near(ours, plain, shapes, form, "cuda")


@pytest.mark.parametrize(
    ("function", "shapes", "kept"),
    [
        (swiglu, [(6, 3, 16)], 6 * 3 * 16),
        (norm, [(6, 3, 16), (16,)], 6 * 3 * 16 + 16 + 6 * 3),
        (rope, [(6, 3, 4, 8)], 2 * 6 * 3 * 8),
        (dropped_on, [(6, 3, 16), (6, 3, 16)], 6 * 3 * 16),
    ],
    ids=["swiglu", "rms_norm", "rope: its tables", "dropout: its factor"],
)
def test_kept_for_the_backward_is_the_input(function: Kernel, shapes: list[tuple[int, ...]], kept: int) -> None:
    assert kept_by(lambda *given: function(*given, EAGER), inputs(shapes, torch.bfloat16)) == kept


def kept_by(function: Function, given: list[torch.Tensor]) -> int:
    """Count the elements that autograd keeps for the backward of `function`."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*given)
    return sum(tensor.numel() for tensor in saved)


@pytest.mark.parametrize("kind", ACTIVATIONS.values(), ids=list(ACTIVATIONS))
def test_the_kernel_of_an_activation_does_as_its_record_says(kind: Activation) -> None:
    (x,) = inputs([(6, 3, kind.num_inputs * 8)], torch.bfloat16)
    kernel = ActivationKernel(kind.name, EAGER)
    assert kernel(x).shape == (6, 3, 8)
    assert kept_by(kernel, [x]) == 6 * 3 * kind.num_inputs * 8


@pytest.mark.parametrize("kind", NORMS.values(), ids=list(NORMS))
def test_the_kernel_of_a_norm_does_as_its_record_says(kind: Norm) -> None:
    given = inputs([(6, 3, 16), *[(16,) for _ in kind.parameters]], torch.bfloat16)
    kept = kept_by(NormKernel(kind.name, EPS, EAGER), given)
    assert kept - len(kind.parameters) * 16 == 6 * 3 * (16 + len(kind.statistics))


def test_a_name_without_a_kernel_is_an_error_and_no_other_kernel() -> None:
    with pytest.raises(KeyError, match="relu"):
        ActivationKernel("relu", EAGER)
    with pytest.raises(KeyError, match="batchnorm"):
        NormKernel("batchnorm", EPS, EAGER)
