"""Our kernels' calls of torch's operators, bound to their schemas: a GPU's operators never run on a machine without one."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.kernel_calls import (
    ATEN,
    MAKERS,
    META,
    attend_and_back,
    bind,
    gpu_kernel,
    masks,
    misfit,
    recorded,
    schema_at_hand,
)
from tests.torch_versions import NAMES
from triaxis.engine.kernels import flash_attention
from triaxis.engine.kernels.masked_attention import Mask

FORWARD, BACKWARD = "_flash_attention_forward", "_flash_attention_backward"


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def test_every_operator_that_is_called_by_name_is_recorded() -> None:
    named = {name.removeprefix(ATEN) for names in NAMES.values() for name in names if name.startswith(ATEN)}
    # `launch/footprint/own_costs.py` counts what `Tensor.addmm_` calls.
    assert named == MAKERS.keys() | {"addmm_"}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("is_packed", [False, True])
def test_each_argument_of_flash_attention_means_what_we_give_it(window: int | None, is_packed: bool) -> None:
    """Tensors are compared as objects, so two of one shape cannot change places."""
    lead = (6,) if is_packed else (2, 3)
    q, out, grad = (meta(*lead, 4, 8) for _ in range(3))
    k, v = (meta(*((9,) if is_packed else (2, 7)), 2, 8) for _ in range(2))
    lse = meta(4, 6, dtype=torch.float32) if is_packed else meta(2, 4, 3, dtype=torch.float32)
    boundaries = (meta(3, dtype=torch.int32), meta(3, dtype=torch.int32)) if is_packed else None
    longest = (4, 5) if is_packed else (3, 7)
    options = flash_attention.flash_options(Mask(window), 0.3)
    with recorded(FORWARD) as forward, recorded(BACKWARD) as backward:
        flash_attention.flash_forward(q, k, v, boundaries, longest, **options)
        flash_attention.flash_backward(grad, q, k, v, out, lse, boundaries, longest, **options)
    of_queries, of_keys = (None, None) if boundaries is None else boundaries
    both = {
        "query": q,
        "key": k,
        "value": v,
        "cum_seq_q": of_queries,
        "cum_seq_k": of_keys,
        "max_q": longest[0],
        "max_k": longest[1],
        "dropout_p": 0.0,
        "is_causal": window is None,
        "scale": 0.3,
        "window_size_left": -1 if window is None else window - 1,
        "window_size_right": 0,
    }
    found = bind(forward[0], schema_at_hand(FORWARD))
    expect(found, both | {"return_debug_mask": False})
    found = bind(backward[0], schema_at_hand(BACKWARD))
    state, unused = found.pop("rng_state"), found.pop("unused")
    expect(found, both | {"grad_out": grad, "out": out, "logsumexp": lse})
    assert (state.dtype, tuple(state.shape), state.device) == (torch.uint64, (2,), META) and unused.numel() == 0


def expect(found: dict[str, Any], given: dict[str, Any]) -> None:
    """Compare what an operator gets with what was given; what was not given is at None."""
    assert given.keys() <= found.keys()
    for name, value in found.items():
        wanted = given.get(name)
        same = value is wanted if isinstance(wanted, torch.Tensor) else value == wanted
        assert same and type(value) is type(wanted), name


@pytest.mark.parametrize("mask", masks(META), ids=str)
def test_shapes_that_a_gpus_kernel_returns(mask: Mask) -> None:
    """torch computes them on its meta device, from the very calls."""
    tokens = 16 if mask.part is None else 8
    of_keys = (2, 2, 16, 8)
    expected = [(2, 4, tokens, 8), (2, 4, tokens), (2, 4, tokens, 8), of_keys, of_keys]
    assert attend_and_back(gpu_kernel(mask), mask, torch.bfloat16, META) == expected


SCHEMA_CHANGES: dict[str, tuple[Callable[[str], str], str]] = {
    "renamed": (lambda schema: schema.replace("window_size_left", "left"), "window_size_left"),
    "removed": (
        lambda schema: schema.replace("*, float? scale=None, ", "*, "),
        "keyword argument 'scale'|at most 16 argument.* but received 17",
    ),
    "one more is needed": (lambda schema: schema.replace(" *, ", " float factor, *, "), "factor"),
    "of another type": (lambda schema: schema.replace("SymInt max_q", "Tensor max_q"), "max_q"),
    "two of one type changed places": (
        lambda schema: schema.replace("max_q", "max_").replace("max_k", "max_q").replace("max_", "max_k", 1),
        "other values of max_k, max_q",
    ),
    "two tensors changed places": (
        lambda schema: schema.replace("Tensor key, Tensor value", "Tensor value, Tensor key"),
        "other values of key, value",
    ),
}


@pytest.mark.parametrize("change", SCHEMA_CHANGES)
@pytest.mark.parametrize("operator", [FORWARD, BACKWARD])
def test_a_changed_schema_does_not_fit(operator: str, change: str) -> None:
    """With the documents of queries and keys apart, so that their longest ones have other lengths."""
    with recorded(operator) as calls:
        mask = masks(META)[3]
        attend_and_back(gpu_kernel(mask), mask, torch.bfloat16, META)
    schema = schema_at_hand(operator)
    rewrite, reason = SCHEMA_CHANGES[change]
    assert rewrite(schema) != schema and not any(misfit(call, schema) for call in calls)
    assert any(re.search(reason, misfit(call, rewrite(schema))) for call in calls)


def test_a_wrong_argument_of_ours_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    options = flash_attention.flash_options
    wrong = {"window_left": 3}
    monkeypatch.setattr(flash_attention, "flash_options", lambda mask, scale: options(mask, scale) | wrong)
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'window_left'"):
        attend_and_back(gpu_kernel(Mask(3)), Mask(3), torch.bfloat16, META)
