"""Sums of the rows of a token: their order, their dtype, slots without a row, and what they need beside the result."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.harness import compiler
from triaxis.engine.expert_parallel.dispatch import sum_rows
from triaxis.engine.kernels.fusion import EAGER, Fusion

FORMS = ["eager", pytest.param("compiled", marks=[compiler(), pytest.mark.slow])]
TOKENS, SLOTS, WIDTH = 50, 3, 16


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [150, 16] and places [50, 3]. A token's first two rows cancel, and are too large to be added to the third first."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(TOKENS * SLOTS, WIDTH, generator=generator, dtype=torch.float64)
    places = torch.randperm(TOKENS * SLOTS, generator=generator).view(TOKENS, SLOTS)
    rows[places[:, 0]] *= 2.0**80
    rows[places[:, 1]] = -rows[places[:, 0]]
    return rows.to(dtype), places


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_of_a_token_are_added_one_after_the_other(dtype: torch.dtype, form: str) -> None:
    rows, places = drawn(dtype)
    result = sum_rows(rows, places, Fusion(form))  # type: ignore[arg-type]
    assert torch.equal(result, rows[places[:, 2]])
    reverse = sum_rows(rows, places.flip(1), Fusion(form))  # type: ignore[arg-type]
    assert not reverse.any(), "the order can be seen"


@pytest.mark.parametrize("form", FORMS)
def test_slots_without_a_row_add_nothing_whatever_unused_rows_hold(form: str) -> None:
    rows, places = drawn(torch.bfloat16)
    used = rows.sign()[:100]
    places = places.where(places < 100, 120)
    padded = torch.cat((used, torch.full((20, WIDTH), torch.nan, dtype=rows.dtype)))
    expected = torch.cat((used, torch.zeros(1, WIDTH, dtype=rows.dtype))).float()[places.clamp(max=100)]
    result = sum_rows(padded, places, Fusion(form), has_gaps=True)  # type: ignore[arg-type]
    assert torch.equal(result, (expected[:, 0] + expected[:, 1] + expected[:, 2]).bfloat16())
    none = sum_rows(padded, torch.full_like(places, 120), EAGER, has_gaps=True)
    assert torch.equal(none, torch.zeros(TOKENS, WIDTH, dtype=rows.dtype))


class Made(TorchDispatchMode):
    """The largest floating-point tensor that an operator makes, in elements, and the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.names = 0, set[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.names.add(func.name().removeprefix("aten::"))
        for each in tree_iter(result):
            if each.is_floating_point():
                self.most = max(self.most, each.numel())
        return result


def test_no_operator_copies_all_rows_or_adds_by_an_index() -> None:
    rows, places = drawn(torch.bfloat16)
    with Made() as made:
        sum_rows(rows, places, EAGER)
        sum_rows(rows, places, EAGER, has_gaps=True)
    assert made.most == TOKENS * WIDTH
    # Kernels with atomic additions on CUDA, where the order differs from run to run.
    assert not made.names & {"index_add", "index_add_", "scatter_add_", "index_put_", "_index_put_impl_"}, made.names
