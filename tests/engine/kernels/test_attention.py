"""Every attention kernel against the textbook in float64, and what is said of one that does not run here."""

import math
import re

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.config.values.attention_kernels import ATTENTION_KERNELS
from triaxis.engine.errors import ConfigError
from triaxis.engine.kernels.attention import attention
from triaxis.engine.kernels.attention_trials import AttentionShape, attention_failure, attention_refusal, chosen

CPU = torch.device("cpu")
ON_CPU = ("sdpa", "flash")
S, D = 48, 16


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v over the keys up to each query's place, the queries being the last of them."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    s, s_k = scores.shape[-2:]
    future = torch.ones(s, s_k, dtype=torch.bool, device=q.device).triu(1 + s_k - s)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


def compare(
    kernel: str,
    kv_heads: int,
    queries: int,
    dtype: torch.dtype,
    device: torch.device,
    near: float,
    *,
    keys: int = S,
    head_dim: int = D,
) -> None:
    """Against the textbook in float64 on the CPU, forward and backward."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    given = [drawn(2, heads, length, head_dim) for heads, length in ((4, queries), (kv_heads, keys), (kv_heads, keys))]
    grad = drawn(2, 4, queries, head_dim)
    inputs = [tensor.clone().requires_grad_() for tensor in given]
    exact = [tensor.cpu().double().requires_grad_() for tensor in given]
    found = attention(kernel, *inputs, is_causal=queries > 1)
    wanted = textbook(*exact)
    found.backward(grad)
    wanted.backward(grad.cpu().double())
    for a, b in [(found, wanted), *((one.grad, other.grad) for one, other in zip(inputs, exact, strict=True))]:
        assert a is not None and b is not None
        assert float((a.cpu().double() - b).norm() / b.norm()) < near


@pytest.mark.parametrize("queries", [S, 1], ids=["a sequence", "its last token"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kernel", ON_CPU)
def test_kernels_equal_the_textbook(kernel: str, kv_heads: int, queries: int) -> None:
    compare(kernel, kv_heads, queries, torch.float64, CPU, 1e-14)
    compare(kernel, kv_heads, queries, torch.bfloat16, CPU, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "head_dim"), [(S, D), (200, 64), (256, 128)])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("kernel", [name for name, each in ATTENTION_KERNELS.items() if each.backend is not None])
def test_kernels_of_a_gpu_equal_the_textbook(kernel: str, kv_heads: int, keys: int, head_dim: int) -> None:
    device = torch.device("cuda")
    if reason := attention_failure(kernel, AttentionShape(4, kv_heads, head_dim, torch.bfloat16, device)):
        pytest.skip(reason)
    compare(kernel, kv_heads, keys, torch.bfloat16, device, 1e-2, keys=keys, head_dim=head_dim)


@pytest.mark.gpu
def test_what_torch_chooses_on_a_gpu_is_in_the_dtype_of_the_run() -> None:
    """float64 has no fused kernel there: the parity tests on GPUs run torch's own formula, to rounding."""
    device = torch.device("cuda")
    compare("sdpa", 2, S, torch.float64, device, 1e-13)
    compare("sdpa", 2, S, torch.float32, device, 1e-5)
    assert chosen(AttentionShape(4, 2, D, torch.float64, device)) == "math"


def shape(**given: int) -> AttentionShape:
    return AttentionShape(
        given.get("heads", 4), given.get("kv_heads", 2), given.get("head_dim", 64), torch.bfloat16, CPU
    )


@pytest.mark.parametrize("kernel", ["cudnn", "efficient"])
def test_a_kernel_that_does_not_run_here_is_refused_before_anything_is_built(kernel: str) -> None:
    reason = attention_failure(kernel, shape())
    assert reason
    message = attention_refusal(kernel, shape(), reason)
    assert re.fullmatch(rf"kernels.attention = {kernel} does not run here.*kernels.attention=sdpa.*", message)
    assert not any(attention_failure(kernel, shape()) for kernel in (*ON_CPU, "explicit"))


def test_what_torch_chooses_is_named() -> None:
    assert chosen(shape()) == "FlashAttentionForCpu"


def refused(rank: int, case: Case) -> str:
    try:
        build_rank(rank, case)
    except ConfigError as error:
        return str(error)
    return "built"


def losses(rank: int, case: Case) -> list[float]:
    engine, batches = build_rank(rank, case)
    found = [engine.train_step(batches.next_step(), 1e-2).loss for _ in range(3)]
    batches.close()
    return found


@pytest.mark.distributed
def test_a_model_trains_with_the_kernel_that_is_named() -> None:
    by_kernel = {}
    for kernel in ("sdpa", "flash", "explicit"):
        (by_kernel[kernel],) = run_ranks(losses, 1, Case("llama", attention=kernel))
    assert by_kernel["sdpa"] == by_kernel["flash"]
    assert by_kernel["explicit"] == pytest.approx(by_kernel["flash"], rel=1e-13)
    (text,) = run_ranks(refused, 1, Case("llama", attention="cudnn", dtype="bf16"))
    assert "kernels.attention = cudnn does not run here" in text and "8 query and 2 key/value heads of size 2" in text
