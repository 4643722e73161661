"""Compiled functions, against the same functions as they are: which calls share a graph, and what each returns and writes."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import compiler
from triaxis.engine.kernels.inductor import MOST_GRAPHS, CompiledFunction, Lengths

pytestmark = compiler()


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) - 3


class Counted:
    """A function, and how often it was traced."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.times = 0

    def __call__(self, *arguments: Any) -> Any:
        self.times += 1
        return self.function(*arguments)


def check(lengths: Lengths, function: Callable[..., Any], calls: list[tuple[Any, ...]], num_graphs: int) -> None:
    """Compare two rounds of calls; the second compiles nothing."""
    counted = Counted(function)
    made = CompiledFunction(counted, lengths)
    for _ in range(2):
        for arguments in calls:
            assert torch.equal(made(*arguments), function(*arguments)), arguments
        assert counted.times == num_graphs


def test_a_graph_serves_one_shape_of_fixed_lengths() -> None:
    xs = [numbers(4, 6), numbers(5, 6), numbers(4, 6).double(), numbers(6, 4).t(), numbers(4, 6) + 1]
    check("fixed", lambda x: x * 2 + 1, [(x,) for x in xs], 4)


def test_a_graph_serves_any_number_of_rows() -> None:
    rows = [7, 9, 1, 0, 1000]
    # torch makes a graph each of no row and of one row.
    check("rows", lambda x, y: x * 2 + y[:, None], [(numbers(n, 6), numbers(n)) for n in rows], 3)


def test_rows_keep_their_stride() -> None:
    wide = numbers(20, 12)
    check("rows", lambda x: x * 2, [(wide[:8, :6],), (wide[3:20, :6],), (wide[:8, 6:],)], 1)


def test_a_graph_serves_any_length_of_contiguous_tensors() -> None:
    shapes = [(4, 6), (3, 2), (100, 3)]
    check("all", lambda x, y: x * y[0], [(numbers(*shape), numbers(shape[1])) for shape in shapes], 1)


def test_a_graph_serves_the_lengths_for_which_it_was_made() -> None:
    """What the function asks of a length is a condition of its graph."""
    check("rows", lambda x: x * (2 if x.shape[0] % 2 else 3), [(numbers(n, 2),) for n in (6, 7, 8, 9, 3)], 2)


def test_constants_choose_the_graph() -> None:
    def function(x: torch.Tensor, factor: float | None, pair: tuple[torch.Tensor, int]) -> torch.Tensor:
        return x * pair[0] if factor is None else x * factor + pair[1]

    calls = [(numbers(3), factor, (numbers(3), n)) for factor, n in ((None, 1), (2.0, 1), (3.0, 1), (2.0, 2))]
    check("fixed", function, calls, 4)


def test_functions_among_the_arguments_are_told_apart() -> None:
    check("fixed", lambda apply, x: apply(x) + 1, [(torch.sin, numbers(3)), (torch.cos, numbers(3))], 2)


def test_results_keep_their_form() -> None:
    made = CompiledFunction(lambda x: (x + 1, (None, x * 2), "text"), "fixed")
    one, (nothing, two), text = made(numbers(3))
    assert torch.equal(one, numbers(3) + 1) and nothing is None and torch.equal(two, numbers(3) * 2) and text == "text"


@pytest.mark.parametrize("start", [0, 1])
def test_arguments_are_written_in_place(start: int) -> None:
    """Also those that lie at an address that vector instructions do not take."""

    def double(to: torch.Tensor, x: torch.Tensor) -> None:
        to.copy_(x * 2)

    memory = torch.zeros(20)
    made = CompiledFunction(double, "all")
    for length in (8, 12, 1):
        where = slice(start, start + length)
        assert made(memory[where], numbers(length)) is None
        assert torch.equal(memory[where], numbers(length) * 2)


def test_a_leaf_gets_no_gradient() -> None:
    weight = numbers(3).requires_grad_()
    assert not CompiledFunction(lambda x: x * 2, "fixed")(weight).requires_grad


def test_no_argument_outlives_its_call() -> None:
    made, x = CompiledFunction(lambda pair: pair[0] * 2, "fixed"), numbers(3)
    made([x, None])
    assert sys.getrefcount(x) == 2


def test_a_function_whose_shapes_never_repeat_is_refused() -> None:
    made = CompiledFunction(torch.neg, "rows")
    for columns in range(MOST_GRAPHS["rows"]):
        made(numbers(3, columns + 2))
    with pytest.raises(RuntimeError, match="neg was called with more than 8 sets of shapes"):
        made(numbers(3, 1))
