"""Attention with windows, documents, sinks and a cap: every kernel against a softmax with a mask, in float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import compiler
from triaxis.engine.data.documents import Documents
from triaxis.engine.kernels import block_attention, flash_attention, masked_attention
from triaxis.engine.kernels.attention import attention
from triaxis.engine.kernels.block_attention import Blocks
from triaxis.engine.kernels.flash_attention import Varlen
from triaxis.engine.kernels.fusion import Form, Fusion
from triaxis.engine.kernels.masked_attention import Mask

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Asked:
    """One attention: heads, lengths of the documents of each row, and what the layer has."""

    heads: int = 4
    kv_heads: int = 2
    rows: tuple[tuple[int, ...], ...] = ((11,), (11,))
    head_dim: int = 6
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    has_sinks: bool = False

    def operands(self, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """q, k, v and sinks, as views with the memory order of a model: [s, b, n, d]."""
        generator = torch.Generator().manual_seed(hash((self.heads, self.rows)) % 2**31)
        s, b = sum(self.rows[0]), len(self.rows)
        q, k, v = (
            torch.randn(s, b, n, self.head_dim, generator=generator, dtype=torch.float64)
            for n in (self.heads, self.kv_heads, self.kv_heads)
        )
        sinks = torch.randn(self.heads, generator=generator, dtype=torch.float64)
        return [*(each.to(dtype).permute(1, 2, 0, 3) for each in (q, k, v)), sinks.to(dtype)]


def naive(asked: Asked, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The textbook, one query at a time: its keys are listed, and everything else does not exist."""
    group = asked.heads // asked.kv_heads
    scale = 1 / math.sqrt(asked.head_dim) if asked.scale is None else asked.scale
    rows = []
    for row, lengths in enumerate(asked.rows):
        first_of = [sum(lengths[:i]) for i, length in enumerate(lengths) for _ in range(length)]
        outs = []
        for query in range(q.shape[2]):
            first = max(first_of[query], 0 if asked.window is None else query - asked.window + 1)
            for head in range(asked.heads):
                keys, values = (x[row, head // group, first : query + 1] for x in (k, v))
                logits = keys @ q[row, head, query] * scale
                if asked.softcap is not None:
                    logits = asked.softcap * torch.tanh(logits / asked.softcap)
                if asked.has_sinks:
                    logits = torch.cat((logits, sinks[head : head + 1]))
                outs.append(logits.softmax(0)[: keys.shape[0]] @ values)
        rows.append(torch.stack(outs).view(q.shape[2], asked.heads, -1).transpose(0, 1))
    return torch.stack(rows)


def compare(kernel: str, asked: Asked, dtype: torch.dtype = torch.float64, near: float = 1e-13) -> None:
    """Output and every gradient."""
    given_tensors = asked.operands(dtype)
    mine = [each.detach().requires_grad_() for each in given_tensors]
    exact = [each.detach().double().requires_grad_() for each in given_tensors]
    found = attention(
        kernel,
        *mine[:3],
        Mask(asked.window, Documents.of(asked.rows)),
        is_causal=True,
        scale=asked.scale,
        softcap=asked.softcap,
        sinks=mine[3] if asked.has_sinks else None,
    )
    wanted = naive(asked, *exact)
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    found.backward(grad)
    wanted.backward(grad.double())
    assert found.dtype == dtype and not found.isnan().any()
    pairs = [("output", found, wanted)]
    names = ("q", "k", "v", "sinks") if asked.has_sinks else ("q", "k", "v")
    pairs += [
        (name, one.grad, other.grad)
        for name, one, other in zip(names, mine, exact, strict=False)  # type: ignore[misc]
    ]
    for name, one, other in pairs:
        # A gradient may be zero, since a query that sees one key has no choice; others are about 1.
        difference = (one.detach().double() - other.detach()).norm()
        assert float(difference) <= near * (1 + float(other.detach().norm())), name


ROWS: Sequence[tuple[tuple[int, ...], ...]] = (
    ((11,), (11,)),
    ((4, 3, 4), (11,)),
    ((1,) * 11,),
    ((5, 1, 5), (5, 6), (1, 10)),
)
"""One document, several, only single tokens, and equal lengths in different places."""


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kernel", ["flash", "blocks"])
def test_kernels_equal_a_masked_softmax(kernel: str, rows: tuple[tuple[int, ...], ...]) -> None:
    for window in (None, 1, 3, 10, 11, 100):
        compare(kernel, Asked(rows=rows, window=window, has_sinks=window in (3, None)))
    compare(kernel, Asked(rows=rows, kv_heads=1, window=4, scale=0.7, has_sinks=True))
    compare(kernel, Asked(rows=rows, kv_heads=4, window=4, has_sinks=True), torch.bfloat16, 2e-2)


@pytest.mark.parametrize("rows", ROWS)
def test_blocks_cap_the_logits(rows: tuple[tuple[int, ...], ...]) -> None:
    for window, has_sinks in ((None, False), (3, True)):
        compare("blocks", Asked(rows=rows, window=window, softcap=0.8, has_sinks=has_sinks, scale=2.0))


@compiler()
@pytest.mark.parametrize("window", [None, pytest.param(300, marks=pytest.mark.slow)])
def test_compiled_blocks_of_any_length_equal_eager_ones(window: int | None) -> None:
    """Two rows and two groups, in blocks of 256, 256 and 88 queries."""
    generator = torch.Generator().manual_seed(1)
    operands = [torch.randn(2, n, 600, 8, generator=generator) for n in (4, 2, 2, 4)]

    def computed(form: Form) -> list[torch.Tensor]:
        q, k, v = (each.clone().requires_grad_() for each in operands[:3])
        out = masked_attention.masked_attention(Blocks(Mask(window), None, 2.0, Fusion(form)), q, k, v, None)
        return [out, *torch.autograd.grad(out, (q, k, v), operands[3])]

    for one, other in zip(computed("compiled"), computed("eager"), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kernel", "block"), [("sdpa", 4), ("blocks", 4), ("blocks", 1)])
def test_a_long_row_is_computed_in_blocks(kernel: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a block of one query, `blocks` takes an eighth of the row: two."""
    for module in (masked_attention, block_attention):
        monkeypatch.setattr(module, "BLOCK", block)
    for window in (None, 2, 6, 9):
        compare(kernel, Asked(rows=((23,), (23,)), window=window, has_sinks=True))
        compare(kernel, Asked(rows=((14, 9), (9, 14)), window=window))


@st.composite
def attentions(draw: st.DrawFn) -> Asked:
    length = draw(st.integers(1, 24))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        ends = draw(st.sets(st.integers(1, length - 1), max_size=5)) if length > 1 else set()
        bounds = [0, *sorted(ends), length]
        rows.append(tuple(b - a for a, b in pairwise(bounds)))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Asked(
        heads=kv_heads * draw(st.sampled_from([1, 2])),
        kv_heads=kv_heads,
        rows=tuple(rows),
        head_dim=draw(st.sampled_from([2, 5, 8])),
        window=draw(st.none() | st.integers(1, 26)),
        softcap=draw(st.none() | st.floats(0.5, 5.0)),
        scale=draw(st.none() | st.floats(0.1, 2.0)),
        has_sinks=draw(st.booleans()),
    )


@given(attentions())
@settings(max_examples=60, deadline=None)
def test_any_attention_equals_a_masked_softmax(asked: Asked) -> None:
    compare("blocks", asked)
    if asked.softcap is None:
        compare("sdpa", asked)


def test_one_document_per_row_is_the_call_without_documents_to_the_bit() -> None:
    q, k, v, _ = Asked().operands()
    plain = attention("sdpa", q, k, v, is_causal=True)
    assert torch.equal(
        plain, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    )
    one = Documents.of([[11], [11]])
    for window in (None, 11, 12):
        assert torch.equal(plain, attention("sdpa", q, k, v, Mask(window, one), is_causal=True))


@pytest.mark.parametrize("kernel", ["sdpa", "blocks"])
def test_a_token_of_one_document_moves_no_bit_of_another(kernel: str) -> None:
    asked = Asked(rows=((4, 5, 2), (6, 5)), window=3)
    documents = Documents.of(asked.rows)
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v, sinks = asked.operands(dtype)
        mask = Mask(asked.window, documents)
        before = attention(kernel, q, k, v, mask, is_causal=True, sinks=sinks)
        for x in (q, k, v):
            x[0, :, 4:9] += 1.0
        after = attention(kernel, q, k, v, mask, is_causal=True, sinks=sinks)
        changed = (before != after).any(-1).any(1)
        assert changed[0, 4:9].all() and not changed[0, :4].any() and not changed[0, 9:].any() and not changed[1].any()


@pytest.mark.parametrize("kernel", ["sdpa", "blocks"])
def test_a_single_query_sees_the_last_keys_of_its_window(kernel: str) -> None:
    """As the last row of the whole sequence does."""
    q, k, v, sinks = Asked().operands()
    for window in (None, 1, 4, 11, 20):
        whole = attention(kernel, q, k, v, Mask(window), is_causal=True, sinks=sinks)
        last = attention(kernel, q[:, :, -1:], k, v, Mask(window), is_causal=False, sinks=sinks)
        assert torch.allclose(last, whole[:, :, -1:], rtol=0, atol=1e-14)


def test_no_tensor_of_all_pairs_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of 1,024 tokens with a window of 64 are [64, 127]; the blocks' scores are [256, 319]."""
    s, largest = 1024, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for each in found if isinstance(found, tuple) else (found,):
                largest = max(largest, each.numel() if isinstance(each, torch.Tensor) else 0)
            return found

    for kernel, limit in (("sdpa", s * 8), ("blocks", 256 * 319)):
        q, k, v = (torch.randn(1, 1, s, 8, requires_grad=True) for _ in range(3))
        largest = 0
        with Watch():
            attention(kernel, q, k, v, Mask(64), is_causal=True).sum().backward()
        assert largest <= limit < s * s


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the two calls of the GPU's kernel by the CPU's, with the shapes and arguments that the GPU's takes."""

    def kernel(options: dict) -> masked_attention.CpuFlash:  # type: ignore[type-arg]
        assert options["window_size_right"] == 0
        window = None if options["window_size_left"] < 0 else options["window_size_left"] + 1
        return masked_attention.CpuFlash(Mask(window), options["scale"])

    def sequences(x, boundaries, longest):  # type: ignore[no-untyped-def]
        """Each sequence alone, [1, n, tokens, d]; of whole rows all, [b, n, tokens, d]."""
        if boundaries is None:
            assert x.dim() == 4 and x.shape[1] == longest
            return [x.transpose(1, 2)]
        lengths = boundaries.diff().tolist()
        assert boundaries.dtype == torch.int32 and max(lengths) == longest and x.dim() == 3
        return [each.unsqueeze(0).transpose(1, 2) for each in x.split([length for length in lengths if length])]

    def both(boundaries, longest):  # type: ignore[no-untyped-def]
        return zip(boundaries or (None, None), longest, strict=True)

    def joined(parts, boundaries):  # type: ignore[no-untyped-def]
        parts = [each.transpose(1, 2) for each in parts]
        return parts[0] if boundaries is None else torch.cat(parts, dim=1)[0]

    def forward(q, k, v, boundaries, longest, **options):  # type: ignore[no-untyped-def]
        of_q, of_k = both(boundaries, longest)
        found = [
            kernel(options).forward(*each)
            for each in zip(sequences(q, *of_q), sequences(k, *of_k), sequences(v, *of_k), strict=True)
        ]
        logarithms = [lse for _, lse in found]
        lse = logarithms[0] if boundaries is None else torch.cat(logarithms, dim=-1)[0]
        return joined([out for out, _ in found], boundaries), lse

    def backward(grad, q, k, v, out, lse, boundaries, longest, **options):  # type: ignore[no-untyped-def]
        of_q, of_k = both(boundaries, longest)
        assert lse.is_contiguous()
        three = [sequences(each, *of_q) for each in (grad, q, out)]
        keys, values = (sequences(each, *of_k) for each in (k, v))
        sizes = [each.shape[2] for each in three[0]]
        logarithms = [lse] if boundaries is None else [each.unsqueeze(0) for each in lse.split(sizes, dim=-1)]
        found = [
            kernel(options).backward(one[0], one[1], one[3], one[4], one[2], one[5])
            for one in zip(*three, keys, values, logarithms, strict=True)
        ]
        return tuple(joined(each, boundaries) for each in zip(*found, strict=True))

    monkeypatch.setattr(flash_attention, "flash_forward", forward)
    monkeypatch.setattr(flash_attention, "flash_backward", backward)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 3])
def test_what_a_gpus_kernel_gets_and_returns(
    rows: tuple[tuple[int, ...], ...], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the kernel itself: packing, boundaries, windows, logarithms, and sinks around it."""
    emulate(monkeypatch)
    monkeypatch.setattr(
        "triaxis.engine.kernels.attention.masked_kernel",
        lambda name, device, mask, scale, softcap, fusion: Varlen(mask, scale),
    )
    compare("varlen", Asked(rows=rows, window=window, has_sinks=True, scale=0.3))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 3])
def test_varlen_on_a_gpu_equals_a_masked_softmax(rows: tuple[tuple[int, ...], ...], window: int | None) -> None:
    asked = Asked(rows=rows, window=window, has_sinks=True, head_dim=16)
    tensors = asked.operands(torch.bfloat16)
    mine = [each.detach().cuda().requires_grad_() for each in tensors]
    exact = [each.detach().double().requires_grad_() for each in tensors]
    documents = Documents.of(rows).map(lambda tensor: tensor.cuda())
    found = attention("varlen", *mine[:3], Mask(window, documents), is_causal=True, sinks=mine[3])
    wanted = naive(asked, *exact)
    found.sum().backward()
    wanted.sum().backward()
    for one, other in [(found, wanted), *((a.grad, b.grad) for a, b in zip(mine, exact, strict=True))]:
        assert one is not None and other is not None
        assert float((one.double().cpu() - other).norm()) <= 2e-2 * float(other.norm()) + 1e-2
