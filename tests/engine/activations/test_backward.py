"""A backward that starts from a gradient: what torch's own does, and without symbolic shapes."""

import sys

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from triaxis.engine.activations.backward import run_backward


def from_edge(output, grad):
    run_backward(get_gradient_edge(output), grad)


@pytest.mark.parametrize("backward", [run_backward, from_edge])
def test_it_gives_the_gradients_of_torch(backward):
    x, grad = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(3, 4, dtype=torch.float64)
    torch.autograd.backward(x.sin(), grad)
    expected, x.grad = x.grad, None
    backward(x.sin(), grad)
    assert torch.equal(x.grad, expected)


def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(RuntimeError, match=r"\[4\].*\[3\]"):
        run_backward(torch.ones(3, requires_grad=True) * 2, torch.ones(4))


def test_it_imports_no_symbolic_shapes(monkeypatch):
    """They would bring sympy into each rank's first step; None among the modules makes their import an error."""
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    x = torch.ones(3, requires_grad=True)
    from_edge(x * 2, torch.ones(3))
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ImportError):
        torch.autograd.backward(x * 2, torch.ones(3))
