"""The sum of squares of long vectors: each call of `torch.dot` gets no more elements than the device's BLAS takes."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.optimizer import distributed
from engine.optimizer.distributed import DOT_NUMEL, add_squares

MOST_NUMEL_OF_CUBLAS = 2**31 - 1
"""cublasSdot counts elements in a signed 32-bit integer, and torch raises beyond it."""


class DotLengths(TorchDispatchMode):
    """Records how many elements each `torch.dot` is given, and computes none."""

    def __init__(self) -> None:
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.dot.default:
            self.numels.append(args[0].numel())
            return args[0].new_zeros(())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("numel", [2**20, MOST_NUMEL_OF_CUBLAS, MOST_NUMEL_OF_CUBLAS + 1, 5 * 2**30 + 3])
def test_a_gpu_sums_a_vector_that_is_longer_than_cublas_counts(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors of the meta device have no memory; here they are cut as those of a GPU.
    monkeypatch.setattr(distributed, "DOT_NUMEL", {"meta": DOT_NUMEL["cuda"]})
    with DotLengths() as lengths:
        add_squares(torch.zeros((), device="meta"), torch.empty(numel, device="meta"))
    assert sum(lengths.numels) == numel
    assert max(lengths.numels) <= MOST_NUMEL_OF_CUBLAS


def test_pieces_add_up_to_the_whole() -> None:
    values = torch.arange(3 * DOT_NUMEL["cpu"] + 5, dtype=torch.float64) % 7
    total = torch.ones((), dtype=torch.float64)
    add_squares(total, values)
    assert float(total) == 1 + float(values.square().sum())
