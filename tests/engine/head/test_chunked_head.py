"""A head whose logits exist for some tokens at a time, against the whole one, on one rank (several: tests/parity)."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import compiler
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.head.chunked_head import chunked_head_losses
from triaxis.engine.head.cross_entropy import vocab_parallel_cross_entropy
from triaxis.engine.kernels.fusion import EAGER, Fusion
from triaxis.engine.layout.shard_spec import Init, ParamSpec, localize
from triaxis.engine.linear.layers import ColumnParallelLinear
from triaxis.engine.linear.weight_grads import WeightGradQueue
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

S, B, H, VOCAB, COLUMNS = 5, 3, 2, 19, 24
TOKENS = S * B


@dataclass
class Bucket:
    """The gradients that a bucket was told of."""

    is_complete: bool = True
    stays: bool = True
    version: int = 0
    is_old: bool = False
    added: list[str] = field(default_factory=list)

    def complete(self) -> None: ...

    def overwrites(self, parameter: ShardedParameter) -> bool:
        return self.is_old

    def grad_added(self, parameter: ShardedParameter) -> None:
        self.added.append(parameter.record.name)


@dataclass
class Run:
    """One forward and backward: losses [s, b], gradient of x [s, b, h], main grad [columns, h] and who was told."""

    losses: torch.Tensor
    grad: torch.Tensor
    main_grad: torch.Tensor
    added: list[str]


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [s, b, h], the weight [columns, h], the losses' gradients [s, b], all in float64, and targets [s, b], not contiguous."""
    generator = torch.Generator().manual_seed(3)
    x, weight, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((S, B, H), (COLUMNS, H), (S, B))
    )
    return x, weight, grad, torch.randint(VOCAB, (B, S), generator=generator).t()


def run(
    at_a_time: int | None,
    dtype: torch.dtype = torch.float64,
    *,
    is_old: bool = False,
    fusion: Fusion = EAGER,
    device: str = "cpu",
) -> Run:
    """With the head in pieces, or (None) whole; the main grad begins with ones."""
    *floats, targets = (tensor.to(device) for tensor in given())
    leaf, weight, grad = (tensor.to(dtype) for tensor in floats)
    wide = torch.promote_types(dtype, torch.float32)
    spec = ParamSpec("head.weight", (COLUMNS, H), Init("zeros"), tp_dim=0)
    parameter = ShardedParameter(localize(spec, tp=1, tp_index=0, sequence_parallel=False), dtype)
    bucket = Bucket(is_old=is_old)
    main_grad = torch.ones(COLUMNS, H, dtype=wide, device=device)
    parameter.bind(weight, main_grad, bucket)
    axis = Axis("tp", [0], 0, None, Ledger())
    head = ColumnParallelLinear([parameter], [], TensorParallelRegion(axis, False), WeightGradQueue(), "head")
    leaf.requires_grad_()
    if at_a_time is None:
        losses = vocab_parallel_cross_entropy(head(leaf), targets, axis, VOCAB, fusion)
    else:
        losses = chunked_head_losses(leaf, targets, grad.to(wide), head, VOCAB, at_a_time, fusion)
    losses.backward(grad.to(losses.dtype))
    assert leaf.grad is not None
    return Run(losses.detach(), leaf.grad, main_grad, bucket.added)


def by_torch(*, is_old: bool) -> Run:
    """In float64, without a line of ours."""
    x, weight, grad, targets = given()
    x.requires_grad_()
    weight.requires_grad_()
    logits = (x @ weight.t())[..., :VOCAB]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(S, B)
    losses.backward(grad)
    assert x.grad is not None and weight.grad is not None
    return Run(losses.detach(), x.grad, weight.grad + (not is_old), ["head.weight"])


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("at_a_time", [1, 4, TOKENS, 100])
def test_pieces_equal_torch(at_a_time: int, is_old: bool) -> None:
    found, wanted = run(at_a_time, is_old=is_old), by_torch(is_old=is_old)
    for name in ("losses", "grad", "main_grad"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-13, atol=1e-13)
    assert found.added == wanted.added, "one gradient, however many pieces"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_pieces_are_as_near_as_a_narrow_whole(dtype: torch.dtype) -> None:
    pieces, whole = run(4, dtype), run(None, dtype)
    eps = torch.finfo(dtype).eps
    for name in ("losses", "grad", "main_grad"):
        # The logits are rounded alike; sums over pieces are rounded once more per piece.
        torch.testing.assert_close(getattr(pieces, name), getattr(whole, name), rtol=4 * eps, atol=8 * eps)


def compiled_pieces_equal_torch(device: str) -> None:
    found, wanted = run(4, fusion=Fusion("compiled"), device=device), by_torch(is_old=False)
    for name in ("losses", "grad", "main_grad"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(wanted, name), rtol=1e-13, atol=1e-13)


@compiler()
def test_compiled_pieces_equal_torch() -> None:
    compiled_pieces_equal_torch("cpu")


@pytest.mark.gpu
def test_compiled_pieces_of_a_gpu_equal_torch() -> None:
    compiled_pieces_equal_torch("cuda")


class Logits(TorchDispatchMode):
    """The most rows of a tensor that is as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] in ((COLUMNS,), (VOCAB,)):
            self.most = max(self.most, result.numel() // result.shape[-1])
        return result


def test_logits_of_all_tokens_never_exist_and_none_is_kept() -> None:
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with Logits() as logits, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(4)
    assert logits.most == 4
    assert kept == [TOKENS * H * 8], "the gradient of the head's input"
    with Logits() as logits:
        run(None)
    assert logits.most == TOKENS, "a whole head's are seen"


def test_the_logits_of_a_piece_are_freed_before_the_next_ones_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert all(each() is None for each in made)
        out = F.linear(x, weight)
        made.append(weakref.ref(out))
        return out

    monkeypatch.setattr("triaxis.engine.head.chunked_head.F", SimpleNamespace(linear=linear))
    run(4)
    assert len(made) == 4, "once for each piece"
