"""RMSNorm over all heads in one process, against torch's over one vector; tests/parity/test_blocks.py cuts the heads over ranks."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from tests.harness import compiler
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.tensor_parallel.qk_norm import normalised, squares

EPS = 1e-5
SHAPES = {"q": (3, 2, 4, 5), "k": (3, 2, 2, 5), "q_weight": (4, 5), "k_weight": (2, 5)}


def given(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES.values())
    return [each.to(dtype).requires_grad_() for each in made]


def ours(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *, offset: int, fusion: Fusion
) -> torch.Tensor:
    sums = squares(q, k, Axis("tp", [0], 0, None, Ledger()), 1, fusion)
    q = normalised(q, sums[..., :1], q_weight, 20, EPS, offset, fusion)
    k = normalised(k, sums[..., 1:], k_weight, 10, EPS, offset, fusion)
    return torch.cat((q.flatten(2), k.flatten(2)), dim=-1)


def plain(*tensors: torch.Tensor, offset: int) -> torch.Tensor:
    q, k, q_weight, k_weight = tensors
    q = F.rms_norm(q.flatten(2), (20,), q_weight.flatten() + offset, EPS)
    return torch.cat((q, F.rms_norm(k.flatten(2), (10,), k_weight.flatten() + offset, EPS)), dim=-1)


@pytest.mark.parametrize(
    ("offset", "form"),
    [
        (0, "eager"),
        (1, "eager"),
        pytest.param(0, "compiled", marks=[compiler(), pytest.mark.slow]),
        pytest.param(1, "compiled", marks=compiler()),
    ],
)
def test_output_and_gradients_are_those_of_plain_torch(offset: int, form: Literal["eager", "compiled"]) -> None:
    found = []
    for output in (ours(*(a := given()), offset=offset, fusion=Fusion(form)), plain(*(b := given()), offset=offset)):
        tensors = a if not found else b
        grad = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view(output.shape)
        found.append([output.detach(), *torch.autograd.grad(output, tensors, grad)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    def function(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, q_weight, k_weight = tensors
        return ours(q, k, q_weight, k_weight, offset=1, fusion=EAGER)

    assert torch.autograd.gradcheck(function, given())


def test_in_bf16_it_is_rounded_once() -> None:
    """The sums are in fp32, and the output is that of float64 to half a step."""
    tensors = given(torch.bfloat16)
    exact = plain(*(each.detach().double() for each in tensors), offset=0)
    q, k, q_weight, k_weight = tensors
    found = ours(q, k, q_weight, k_weight, offset=0, fusion=EAGER)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 * 1.01).all()
