"""Attention from a part of each row to all of it: every kernel against the softmax of whole rows, in float64."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.kernels.test_masked_attention import Asked, emulate, naive
from triaxis.engine.config.quantities.attention_pattern import AttentionPattern
from triaxis.engine.context_parallel.deal import runs_of_ranks
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.kernels.attention import masked_kernel
from triaxis.engine.kernels.attention_trials import AttentionShape, attention_failure
from triaxis.engine.kernels.cudnn_attention import Cudnn
from triaxis.engine.kernels.explicit_attention import explicit_attention
from triaxis.engine.kernels.flash_attention import Varlen
from triaxis.engine.kernels.masked_attention import Kernel, Mask, masked_attention

CPU = torch.device("cpu")
ROWS: Sequence[tuple[tuple[int, ...], ...]] = (
    ((16,), (16,)),
    ((4, 3, 9), (16,)),
    ((1,) * 16,),
    ((5, 1, 10), (8, 8), (1, 15)),
)


def part_of(rows: Sequence[Sequence[int]], size: int, rank: int) -> SequencePart:
    return SequencePart.of([runs_of_ranks(row, size, {None: 1}) for row in rows], rank, rows)


def compare(kernel: str, asked: Asked, size: int) -> None:
    """The output of each rank, and the sum of the ranks' gradients."""
    operands = asked.operands()
    exact = [each.detach().requires_grad_() for each in operands]
    mine = [each.detach().requires_grad_() for each in operands]
    wanted = naive(asked, *exact)
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted.backward(grad)
    for rank in range(size):
        part = part_of(asked.rows, size, rank)
        index = part.positions[:, None, :, None].expand(-1, asked.heads, -1, asked.head_dim)
        q, k, v = mine[0].gather(2, index), mine[1], mine[2]
        sinks = mine[3] if asked.has_sinks else None
        documents = None if kernel == "cudnn" else Documents.of(asked.rows)
        mask = Mask(asked.window, documents, part)
        if kernel == "explicit":
            options = {"scale": asked.scale, "softcap": asked.softcap, "sinks": sinks}
            found = explicit_attention(q, k, v, mask, **options, drop=lambda x: x)  # type: ignore[arg-type]
        else:
            of_gpus = {"varlen": Varlen, "cudnn": Cudnn}
            by_name: Kernel[Any]
            if kernel in of_gpus:
                by_name = of_gpus[kernel](mask, asked.scale)
            else:
                by_name = masked_kernel(kernel, CPU, mask, asked.scale, asked.softcap)
            found = masked_attention(by_name, q, k, v, sinks)
        assert (found - wanted.gather(2, index)).abs().max() <= 1e-13
        found.backward(grad.gather(2, index))
    for one, other in zip(mine[: 4 if asked.has_sinks else 3], exact, strict=False):
        assert one.grad is not None and other.grad is not None
        assert (one.grad - other.grad).norm() <= 1e-13 * (1 + float(other.grad.norm()))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kernel", ["flash", "blocks", "explicit", "varlen"])
def test_kernels_equal_a_masked_softmax(
    kernel: str, size: int, rows: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate(monkeypatch)
    for window in (None, 3, 1, 20):
        compare(kernel, Asked(rows=rows, window=window, has_sinks=window == 3, scale=0.3), size)


@pytest.mark.parametrize("size", [2, 4])
def test_cudnn_equals_a_masked_softmax(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the kernel: the calls, the log-sum-exp's shape, the sum of two calls."""
    of_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    of_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward(q, k, v, bias, compute_lse, dropout, is_causal, debug, *, scale):  # type: ignore[no-untyped-def]
        assert bias is None and compute_lse and not dropout and not debug
        out, lse = of_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], None, None, None

    def backward(grad, q, k, v, out, lse, seed, offset, bias, *more, scale):  # type: ignore[no-untyped-def]
        assert bias is None and lse.shape == (*q.shape[:3], 1) and lse.is_contiguous()
        assert more[:-1] == (None, None, q.shape[2], k.shape[2], 0.0)
        return of_cpu_backward(grad, q, k, v, out, lse.squeeze(-1), 0.0, more[-1], scale=scale)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", forward)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", backward)
    for has_sinks in (False, True):
        compare("cudnn", Asked(rows=ROWS[0], has_sinks=has_sinks, scale=0.3), size)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.none() | st.integers(1, 12), st.sampled_from([2, 4]))
def test_any_documents_and_windows(lengths: list[int], window: int | None, size: int) -> None:
    unit = 2 * size
    row = (*lengths, -sum(lengths) % unit or unit)
    compare("flash", Asked(rows=(row,), window=window, heads=2, kv_heads=1), size)


def test_scores_are_capped_in_a_part() -> None:
    for kernel in ("blocks", "explicit"):
        compare(kernel, Asked(rows=ROWS[1], softcap=0.7, window=5), 2)


@pytest.mark.parametrize("kernel", ["sdpa", "flash", "blocks"])
def test_a_kernel_that_has_parts_passes_its_trial(kernel: str) -> None:
    shape = AttentionShape(4, 2, 8, torch.float32, CPU, AttentionPattern(parts=True, windows=True, documents=True))
    assert attention_failure(kernel, shape) == ""


def test_a_kernel_without_parts_fails_its_trial() -> None:
    shape = AttentionShape(4, 2, 8, torch.float32, CPU, AttentionPattern(parts=True))
    assert "no windows, documents" in attention_failure("cudnn", shape)
    assert re.fullmatch(
        r"Could not run '\S+' with arguments from the 'CPU' backend", attention_failure("varlen", shape)
    )


def test_a_causal_mask_at_the_wrong_corner_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kernels align queries with the first keys where there are fewer of them."""
    shape = AttentionShape(4, 2, 8, torch.float32, CPU, AttentionPattern(parts=True))
    part = SequencePart.of([[((0, 64),), ((64, 128),)]], 0, [[128]])
    monkeypatch.setattr(
        "triaxis.engine.kernels.attention.masked_kernel",
        lambda name, device, mask, scale, softcap, fusion: masked_kernel(
            name, device, mask if name == "blocks" else Mask(mask.window, mask.documents, part), scale, softcap
        ),
    )
    assert "causal mask" in attention_failure("flash", shape)
