"""The trial of torch's grouped product: it is taken where it gives what the loop gives, of experts without rows too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from triaxis.engine.config.schema.kernels import KernelsConfig
from triaxis.engine.kernels.attention_trials import AttentionShape
from triaxis.engine.kernels.registry import Choices, device_trials, try_out

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GROUPED = Choices("sdpa", "sdpa", "eager", "separate", "torch", experts="grouped", dispatch="all_gather")


def trial(dtype: torch.dtype) -> tuple[str | None, list[str]]:
    """Return the kernel of experts that is left after the trial, and its notes."""
    trials = device_trials(AttentionShape(4, 2, 16, dtype, CPU), torch.float32)
    choices, notes = try_out(KernelsConfig(), GROUPED, trials)
    return choices.experts, notes


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_that_is_the_loop_s_is_taken(dtype: torch.dtype) -> None:
    assert trial(dtype) == ("grouped", [])


@pytest.mark.parametrize("garbage", [3.0, torch.nan])
@pytest.mark.parametrize("empty", [0, 2, 4])
def test_garbage_in_the_gradient_of_an_expert_without_rows_leaves_the_loop(
    empty: int, garbage: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU whose kernel writes nothing where an expert has no rows to sum over."""
    grouped_mm = F.grouped_mm

    def unwritten(one: torch.Tensor, other: torch.Tensor, **options: Any) -> torch.Tensor:
        result: torch.Tensor = grouped_mm(one, other, **options)
        if other.dim() == 2:
            result[empty] = garbage
        return result

    monkeypatch.setattr(F, "grouped_mm", unwritten)
    kernel, (note,) = trial(torch.bfloat16)
    assert kernel == "loop"
    assert note.startswith("kernels.experts = auto: grouped does not run here") and "without rows" in note
