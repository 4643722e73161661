"""FlexAttention: its numbers in float64, its table of blocks beside torch's own, and the compiled form on a GPU."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from tests.engine.kernels.test_masked_attention import Asked, attentions, compare, naive
from triaxis.engine.kernels.attention import attention
from triaxis.engine.kernels.attention_trials import AttentionShape, attention_failure
from triaxis.engine.kernels.block_attention import Blocks
from triaxis.engine.kernels.flex_attention import BLOCK, Flex, blocks_of
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.kernels.masked_attention import Kernel, Mask

CPU = torch.device("cpu")


@given(attentions())
@settings(max_examples=25, deadline=None)
def test_any_attention_without_documents_equals_a_masked_softmax(asked: Asked) -> None:
    rows = tuple((sum(lengths),) for lengths in asked.rows)
    made = "triaxis.engine.kernels.attention.masked_kernel"
    with patch(made, lambda name, device, mask, scale, softcap, fusion: Flex(mask, scale, softcap)):
        compare("flex", replace(asked, rows=rows))


@pytest.mark.parametrize(("num_queries", "window", "softcap"), [(300, None, 2.0), (300, 150, 2.0), (200, 40, None)])
def test_several_blocks_and_values_of_another_size(num_queries: int, window: int | None, softcap: float | None) -> None:
    """The last queries of a row of 300 keys; two rows, two groups."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn(2, n, s, d, generator=generator, dtype=torch.float64)
        for n, s, d in ((4, num_queries, 8), (2, 300, 8), (2, 300, 6), (4, num_queries, 6))
    )

    def computed(kernel: type[Kernel]) -> list[torch.Tensor]:  # type: ignore[type-arg]
        made = kernel(Mask(window), None, softcap)
        out, lse = made.forward(q, k, v)
        return [out, lse, *made.backward(grad, q, k, v, out, lse)]

    for one, other in zip(computed(Flex), computed(Blocks), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-13)


@given(st.integers(1, 5 * BLOCK), st.integers(0, 3 * BLOCK), st.none() | st.integers(1, 6 * BLOCK))
@settings(max_examples=40, deadline=None)
def test_the_table_has_the_blocks_that_torch_finds_in_the_mask(
    num_queries: int, num_before: int, window: int | None
) -> None:
    num_keys = num_queries + num_before

    def visible(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        at = query + num_before
        return (key <= at) & (key > at - (num_keys if window is None else window))

    mask = create_block_mask(visible, 1, 1, num_queries, num_keys, CPU, BLOCK)
    expected = [each for each in mask.as_tuple() if isinstance(each, torch.Tensor)]
    for one, other in zip(blocks_of(num_queries, num_keys, window, CPU), expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 90])
def test_compiled_on_a_gpu_it_equals_a_masked_softmax(window: int | None) -> None:
    asked = Asked(rows=((200,), (200,)), window=window, softcap=0.8, has_sinks=True, head_dim=32)
    if reason := attention_failure("flex", AttentionShape(4, 2, 32, torch.bfloat16, torch.device("cuda"))):
        pytest.skip(reason)
    tensors = asked.operands(torch.bfloat16)
    mine = [each.detach().cuda().requires_grad_() for each in tensors]
    exact = [each.detach().double().requires_grad_() for each in tensors]
    options = {"softcap": asked.softcap, "sinks": mine[3], "fusion": Fusion("compiled")}
    found = attention("flex", *mine[:3], Mask(window), is_causal=True, **options)
    wanted = naive(asked, *exact)
    found.sum().backward()
    wanted.sum().backward()
    for one, other in [(found, wanted), *((a.grad, b.grad) for a, b in zip(mine, exact, strict=True))]:
        assert one is not None and other is not None
        assert float((one.double().cpu() - other).norm()) <= 2e-2 * float(other.norm()) + 1e-2
