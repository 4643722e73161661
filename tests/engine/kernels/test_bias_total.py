"""Functions that sum the gradient they make over its tokens, against autograd through plain operators in float64.

The plain functions add a bias, of which autograd makes the gradient. In narrower dtypes the sum may be no further from the
truth than that of the plain operators, which sum a rounded gradient.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.harness import compiler
from triaxis.engine.config.schema.layer_kinds import Rotary
from triaxis.engine.kernels.activations import ActivationKernel
from triaxis.engine.kernels.fusion import EAGER, Form, Fusion
from triaxis.engine.kernels.qkv import SplitQkv
from triaxis.engine.kernels.rotary import apply_rope, rope_tables, rotary_frequencies
from triaxis.engine.numerics.precision import accumulation_dtype

S, B, HEAD, HEADS = 6, 3, 8, (4, 2)
WIDTH = (HEADS[0] + 2 * HEADS[1]) * HEAD

AddTotal = Callable[[torch.Tensor], None]
Outputs = tuple[torch.Tensor, ...]
Ours = Callable[[torch.Tensor, Fusion, AddTotal], Outputs]
Plain = Callable[[torch.Tensor], Outputs]


def tables(num_rotated: int, dtype: torch.dtype) -> torch.Tensor:
    rotary = Rotary(num_rotated, 1e4, scaling=None, is_long=False)
    frequencies = rotary_frequencies(rotary, torch.float64, torch.device("cpu"))
    return rope_tables(torch.arange(S).expand(B, S), frequencies).to(accumulation_dtype(dtype))


def activated(name: str) -> Ours:
    return lambda x, fusion, add_total: (ActivationKernel(name, fusion, add_total)(x),)


def gated(pointwise: Callable[[torch.Tensor], torch.Tensor]) -> Plain:
    def function(x: torch.Tensor) -> Outputs:
        gate, up = x.chunk(2, dim=-1)
        return (pointwise(gate) * up,)

    return function


def split(num_rotated: int, *, copies: bool = True) -> Ours:
    def function(x: torch.Tensor, fusion: Fusion, add_total: AddTotal) -> Outputs:
        # In place, it writes to a product that is nobody else's.
        product = x * 1
        found = SplitQkv(HEADS, HEAD, fusion, add_total, copies=copies)(
            product, tables(num_rotated, x.dtype) if num_rotated else None
        )
        is_in_place = found[0].untyped_storage().data_ptr() == product.untyped_storage().data_ptr()
        assert is_in_place == (not copies or not num_rotated)
        return found

    return function


def plain_split(num_rotated: int) -> Plain:
    def function(x: torch.Tensor) -> Outputs:
        q, k, v = x.unflatten(-1, (-1, HEAD)).split((HEADS[0], HEADS[1], HEADS[1]), dim=2)
        if num_rotated:
            q, k = (apply_rope(each, tables(num_rotated, x.dtype), EAGER) for each in (q, k))
        return q, k, v

    return function


CASES: dict[str, tuple[Ours, Plain]] = {
    "gelu": (activated("gelu"), lambda x: (F.gelu(x),)),
    "gelu_tanh": (activated("gelu_tanh"), lambda x: (F.gelu(x, approximate="tanh"),)),
    "relu2": (activated("relu2"), lambda x: (F.relu(x).square(),)),
    "swiglu": (activated("swiglu"), gated(F.silu)),
    "geglu": (activated("geglu"), gated(F.gelu)),
    "geglu_tanh": (activated("geglu_tanh"), gated(lambda x: F.gelu(x, approximate="tanh"))),
    "q, k and v": (split(0), plain_split(0)),
    "q, k and v, rotated": (split(HEAD), plain_split(HEAD)),
    "q, k and v, rotated in part": (split(4), plain_split(4)),
    "q, k and v, rotated in place": (split(HEAD, copies=False), plain_split(HEAD)),
    "q, k and v, rotated in part in place": (split(4, copies=False), plain_split(4)),
}
COMPILED_IN_CI: tuple[str, ...] = ()

in_both_forms = pytest.mark.parametrize(
    ("name", "form"),
    [pytest.param(name, "eager", id=f"{name}-eager") for name in CASES]
    + [
        pytest.param(
            name,
            "compiled",
            id=f"{name}-compiled",
            marks=[compiler(), *([] if name in COMPILED_IN_CI else [pytest.mark.slow])],
        )
        for name in CASES
    ],
)


def given(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(S, B, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def grads_of(outputs: Outputs) -> list[torch.Tensor]:
    """Gradients that are the same for every function, laid out as attention's are: samples before tokens."""
    made = []
    for output in outputs:
        grad = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)
        made.append(grad.transpose(0, 1).contiguous().transpose(0, 1))
    return made


def ours(function: Ours, dtype: torch.dtype, form: Form) -> list[torch.Tensor]:
    """The outputs, the gradient of x and its sum."""
    totals: list[torch.Tensor] = []
    x = given(dtype)
    outputs = function(x, Fusion(form), totals.append)
    torch.autograd.backward(outputs, grads_of(outputs))
    (total,) = totals
    assert x.grad is not None and total.dtype == accumulation_dtype(dtype)
    return [*(output.detach() for output in outputs), x.grad, total]


def plain(function: Plain, dtype: torch.dtype, inputs: torch.dtype) -> list[torch.Tensor]:
    """The same with a bias, computed in one dtype from inputs in another one."""
    x = given(inputs).detach().to(dtype).requires_grad_()
    bias = torch.zeros(WIDTH, dtype=dtype, requires_grad=True)
    outputs = function(x + bias)
    torch.autograd.backward(outputs, grads_of(outputs))
    assert x.grad is not None and bias.grad is not None
    return [*(output.detach() for output in outputs), x.grad, bias.grad]


@in_both_forms
def test_outputs_gradients_and_their_sum_are_those_of_plain_operators(name: str, form: Form) -> None:
    function, reference = CASES[name]
    found, wanted = ours(function, torch.float64, form), plain(reference, torch.float64, torch.float64)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["eager", pytest.param("compiled", marks=[compiler(), pytest.mark.slow])])
@pytest.mark.parametrize("name", CASES)
def test_in_narrower_dtypes_no_further_from_the_truth_than_plain_operators(
    name: str, form: Form, dtype: torch.dtype
) -> None:
    function, reference = CASES[name]
    exact = plain(reference, torch.float64, dtype)
    found, theirs = ours(function, dtype, form), plain(reference, dtype, dtype)
    # Sums of the same few numbers differ by the order of additions.
    slack = 1.05 if dtype == torch.bfloat16 else 2.0
    for mine, torchs, true in zip(found, theirs, exact, strict=True):
        assert (mine - true).norm() <= slack * (torchs - true).norm() + torch.finfo(dtype).eps * 1e-3 * true.norm()


@pytest.mark.parametrize("name", ["gelu", "swiglu", "q, k and v"])
def test_the_sum_is_that_of_the_gradient_as_it_is_stored(name: str) -> None:
    """Operator by operator the sum reads the gradient, so it is that of a layer that sums by itself, to the bit."""
    *_, grad, total = ours(CASES[name][0], torch.bfloat16, "eager")
    assert torch.equal(total, grad.flatten(0, 1).sum(0, dtype=torch.float32))


def test_no_sum_is_made_where_none_is_taken() -> None:
    x = given(torch.float64)
    q, k, v = SplitQkv(HEADS, HEAD, EAGER)(x, None)
    assert all(each.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for each in (q, k, v))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.autograd.backward((q, k, v), (q.detach(), k.detach(), v.detach()))
    assert not [row.key for row in profiler.key_averages() if row.key == "aten::sum"]
    assert x.grad is not None and torch.equal(x.grad, x)
