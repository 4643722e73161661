"""The sum of squares of long vectors: each call of `torch.dot` gets no more elements than the device's BLAS takes."""

import pytest
import torch

from triaxis.engine.optimizer import distributed
from triaxis.engine.optimizer.distributed import DOT_NUMEL, square_sum

MOST_NUMEL_OF_CUBLAS = 2**31 - 1
"""cublasSdot counts elements in a signed 32-bit integer, and torch raises beyond it."""


@pytest.mark.parametrize("numel", [2**20, MOST_NUMEL_OF_CUBLAS, MOST_NUMEL_OF_CUBLAS + 1, 5 * 2**30 + 3])
def test_a_gpu_sums_a_vector_that_is_longer_than_cublas_counts(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numels = []

    def record(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        numels.append(a.numel())
        return a.new_zeros(())

    monkeypatch.setattr(torch, "dot", record)
    # Tensors of the meta device have no memory; here they are cut as those of a GPU.
    monkeypatch.setattr(distributed, "DOT_NUMEL", {"meta": DOT_NUMEL["cuda"]})
    square_sum([torch.empty(numel, device="meta")])
    assert sum(numels) == numel
    assert max(numels) <= MOST_NUMEL_OF_CUBLAS


def test_pieces_add_up_to_the_whole() -> None:
    values = torch.arange(3 * DOT_NUMEL["cpu"] + 5, dtype=torch.float64) % 7
    assert float(square_sum([values, values[:7]])) == float(values.square().sum() + values[:7].square().sum())
