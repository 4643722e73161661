"""Kernels with a backward of their own, against autograd through torch's functions."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.elementwise import activation, rms_norm

EPS = 1e-5

Function = Callable[..., torch.Tensor]


def swiglu(x: torch.Tensor) -> torch.Tensor:
    return activation("swiglu", x)


def plain_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, weight, EPS)


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


KERNELS = [
    pytest.param(swiglu, plain_swiglu, [(6, 3, 16)], id="swiglu"),
    pytest.param(norm, plain_norm, [(6, 3, 16), (16,)], id="rms_norm"),
    pytest.param(norm, plain_norm, [(5, 1, 4, 8), (8,)], id="rms_norm of heads"),
]


def inputs(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    # Tokens come transposed: samples first in memory, with whatever stride a dimension of size 1 has.
    made[0] = made[0].transpose(0, 1).contiguous().transpose(0, 1)
    return [value.requires_grad_() for value in made]


def run(function: Function, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and gradients for a gradient of the output that is the same for every function."""
    output = function(*given)
    grad = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, given, grad)]


@pytest.mark.parametrize(("ours", "plain", "shapes"), KERNELS)
def test_output_and_gradients_are_those_of_plain_torch(
    ours: Function, plain: Function, shapes: list[tuple[int, ...]]
) -> None:
    given = inputs(shapes, torch.float64)
    for one, other in zip(run(ours, given), run(plain, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("ours", "plain", "shapes"), KERNELS)
def test_in_bf16_no_further_from_the_truth_than_plain_torch(
    ours: Function, plain: Function, shapes: list[tuple[int, ...]]
) -> None:
    given = inputs(shapes, torch.bfloat16)
    exact = run(plain, [value.detach().double().requires_grad_() for value in given])
    for mine, torchs, true in zip(run(ours, given), run(plain, given), exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - true).norm() <= 1.05 * (torchs - true).norm()


@pytest.mark.parametrize(
    ("function", "shapes", "kept"),
    [(swiglu, [(6, 3, 16)], 6 * 3 * 16), (norm, [(6, 3, 16), (16,)], 6 * 3 * 16 + 16 + 6 * 3)],
    ids=["swiglu", "rms_norm"],
)
def test_kept_for_the_backward_is_the_input(function: Function, shapes: list[tuple[int, ...]], kept: int) -> None:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs(shapes, torch.bfloat16))
    assert sum(tensor.numel() for tensor in saved) == kept
