"""Cross-entropy over a cut vocabulary, against torch's of the whole one."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import triaxis.engine.head.logits as subject
from tests.harness import compiler, run_ranks
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.head.cross_entropy import vocab_parallel_cross_entropy
from triaxis.engine.head.logits import LogitOptions
from triaxis.engine.kernels.fusion import EAGER, Fusion

S, B, VOCAB, COLUMNS = 5, 3, 19, 8
"""On three ranks the third holds 3 columns of the vocabulary and 5 of padding, on four the last holds padding alone."""

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def given(size: int, scale: float = 3.0, dtype: torch.dtype = torch.float64) -> Given:
    """Logits [s, b, size x columns] with values in the padding, targets [s, b], and the losses' gradients [s, b]."""
    generator = torch.Generator().manual_seed(7)
    columns = max(size * COLUMNS, VOCAB)
    logits = (torch.randn(S, B, columns, generator=generator, dtype=torch.float64) * scale).to(dtype)
    targets = torch.randint(VOCAB, (S, B), generator=generator)
    return logits, targets, torch.rand(S, B, generator=generator, dtype=torch.float64)


def truth(size: int, scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, and the gradient of the whole logits, in float64."""
    logits, targets, grad = given(size, scale, dtype)
    whole = logits.double().requires_grad_()
    losses = F.cross_entropy(whole[..., :VOCAB].flatten(0, 1), targets.flatten(), reduction="none").view(S, B)
    losses.backward(grad)
    assert whole.grad is not None
    return losses.detach(), whole.grad


def one_rank(
    axis: Axis, logits: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor, fusion: Fusion = EAGER
) -> list[torch.Tensor]:
    """[losses, gradient of this rank's columns]."""
    leaf = logits.chunk(axis.size, dim=-1)[axis.index].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(leaf.clone(), targets, axis, VOCAB, fusion)
    losses.backward(grad.to(losses.dtype))
    assert leaf.grad is not None
    return [losses.detach(), leaf.grad]


def alone() -> Axis:
    return Axis("tp", [0], 0, None, Ledger())


def set_chunk(numel: int) -> None:
    subject.CHUNK_NUMEL = MappingProxyType({"cpu": numel})


def of_ranks(rank: int, size: int, chunk_numel: int, scale: float) -> list[torch.Tensor]:
    set_chunk(chunk_numel)
    axis = Axis("tp", list(range(size)), rank, dist.group.WORLD if size > 1 else None, Ledger())
    return one_rank(axis, *given(size, scale))


@pytest.mark.distributed
@pytest.mark.parametrize("chunk_numel", [1, 2 * COLUMNS, 10**6])
@pytest.mark.parametrize("size", [3, 4])
def test_ranks_together_equal_torch(size: int, chunk_numel: int) -> None:
    # Logits of some hundreds overflow exp in any dtype unless the largest of ALL ranks is taken off.
    for scale in (3.0, 300.0):
        losses, grad = truth(size, scale, torch.float64)
        found = run_ranks(of_ranks, size, size, chunk_numel, scale)
        for rank_losses, _ in found:
            torch.testing.assert_close(rank_losses, losses, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(torch.cat([part for _, part in found], dim=-1), grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_chunks_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for numel in (1, 50, 10**6):
        monkeypatch.setattr(subject, "CHUNK_NUMEL", {"cpu": numel})
        found.append(one_rank(alone(), *given(1, dtype=dtype)))
    for losses, grad in found[1:]:
        assert torch.equal(losses, found[0][0]) and torch.equal(grad, found[0][1])
    losses, grad = truth(1, 3.0, dtype)
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(found[0][0].double(), losses, rtol=30 * eps, atol=30 * eps)
    # The gradient is rounded once, to the dtype of the logits.
    torch.testing.assert_close(found[0][1].double(), grad, rtol=torch.finfo(dtype).eps, atol=30 * eps)


def compiled_equals_torch(dtype: torch.dtype, device: str) -> None:
    """One rank with all columns, 5 of them padding."""
    logits, targets, grad = (tensor.to(device) for tensor in given(3, dtype=dtype))
    losses, grad_logits = (
        found.cpu().double() for found in one_rank(alone(), logits, targets, grad, Fusion("compiled"))
    )
    wanted_losses, wanted_grad = truth(3, 3.0, dtype)
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(losses, wanted_losses, rtol=30 * eps, atol=30 * eps)
    torch.testing.assert_close(grad_logits, wanted_grad, rtol=torch.finfo(dtype).eps, atol=30 * eps)


@compiler()
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_compiled_passes_equal_torch(dtype: torch.dtype) -> None:
    compiled_equals_torch(dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_compiled_passes_of_a_gpu_equal_torch(dtype: torch.dtype) -> None:
    compiled_equals_torch(dtype, "cuda")


class Largest(TorchDispatchMode):
    """The most elements of a new tensor in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.numel = max(self.numel, result.numel())
        return result


def test_exponentials_of_all_tokens_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "CHUNK_NUMEL", {"cpu": 2 * VOCAB})
    with Largest() as largest:
        one_rank(alone(), *given(1, dtype=torch.bfloat16))
    assert largest.numel == 2 * VOCAB < S * B * VOCAB


def test_the_gradient_is_written_over_the_logits_and_a_second_backward_is_refused() -> None:
    logits, targets, grad = given(1)
    leaf = logits.clone().requires_grad_()
    product = leaf * 1.0
    losses = vocab_parallel_cross_entropy(product, targets, alone(), VOCAB)
    losses.backward(grad, retain_graph=True)
    assert leaf.grad is not None and torch.equal(product.detach(), leaf.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.backward(grad)


@pytest.mark.parametrize("form", ["eager", pytest.param("compiled", marks=compiler())])
def test_logits_and_z_loss_equal_plain_torch(form: Literal["eager", "compiled"]) -> None:
    generator = torch.Generator().manual_seed(2)
    targets, options = torch.tensor([[3, 0], [6, 2]]), LogitOptions(0.5, 1.3, 0.2)
    y = torch.randn(2, 2, 8, dtype=torch.float64, generator=generator).requires_grad_()
    z = 1.3 * torch.tanh(y[..., :7] / 0.5 / 1.3)
    plain = torch.nn.functional.cross_entropy(z.flatten(0, 1), targets.flatten(), reduction="none")
    (want,) = torch.autograd.grad((plain + 0.2 * z.logsumexp(-1).flatten().square()).sum(), y)
    ours = vocab_parallel_cross_entropy(y.clone(), targets, alone(), 7, Fusion(form), options)
    (got,) = torch.autograd.grad(ours.sum(), y)
    torch.testing.assert_close(ours.flatten(), plain, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
