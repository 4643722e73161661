"""Emulated FP8: with the same micro batch each layout has the scales of one process, and so its numbers.

In float64 a layout differs by rounding only. A number is rounded to another one of FP8 only where it lies within that rounding of
the middle of two, which none here does.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case, OracleResult, RankResult, assemble, run_case, weights_of
from tests.parity.test_parity import check
from tests.parity.test_step_properties import traffic_of_a_step
from triaxis.engine.comm.ledger import FP8_SCALES

NUM_STEPS = 3
SMALL: dict[str, Any] = {"num_layers": 2, "global_batch_size": 4}

COVERING = [
    Case("gpt", tp=2, fp8="tensorwise", **SMALL),
    Case("qwen", tp=2, pp=2, dp=2, zero=2, sequence_parallel=True, fp8="tensorwise", **SMALL),
    Case("llama", tp=2, cp=2, sequence_parallel=True, fp8="tensorwise", recompute=("full", "uniform", 1), **SMALL),
    Case("blocks_of_32", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", fp8="mxfp8", **SMALL),
    Case("blocks_of_128", tp=2, dp=2, fp8="blockwise", num_layers=1, global_batch_size=2),
]

COVERING_TOO = [
    Case("llama", tp=2, dp=2, sequence_parallel=True, fp8="tensorwise-e4m3", fp8_gather=True, **SMALL),
    Case(
        "qwen", tp=2, pp=2, dp=2, sequence_parallel=True, schedule="zb_h1", fp8="tensorwise", fp8_gather=True, **SMALL
    ),
    Case(
        "llama", tp=2, cp=2, sequence_parallel=True, gathered_inputs="keep", fp8="tensorwise", fp8_gather=True, **SMALL
    ),
    Case(
        "mla",
        tp=2,
        dp=2,
        sequence_parallel=True,
        fp8="tensorwise",
        fp8_gather=True,
        recompute=("selective", "uniform", 1),
        modules=("norm",),
        **SMALL,
    ),
    Case("gpt_dropout", tp=4, sequence_parallel=True, fp8="tensorwise", fp8_gather=True, offload=1, **SMALL),
    Case("deepseek", tp=2, dp=2, ep=2, sequence_parallel=True, fp8="tensorwise", fp8_gather=True, **SMALL),
    Case(
        "llama",
        tp=2,
        sequence_parallel=True,
        fp8="tensorwise",
        fp8_gather=True,
        frozen=("*.q.weight", "*.kv.weight"),
        **SMALL,
    ),
    Case("qwen", tp=4, dp=2, fp8="tensorwise", **SMALL),
    Case("qwen", tp=2, sequence_parallel=True, fp8="tensorwise", compiled=True, **SMALL),
    Case("blocks_of_32", tp=2, fp8="mxfp8", compiled=True, **SMALL),
    Case("llama", pp=2, vpp=2, dp=2, cp=2, fp8="tensorwise", num_layers=4, global_batch_size=4),
    Case("gpt_dropout", tp=2, pp=2, vpp=2, sequence_parallel=True, schedule="zbv", fp8="tensorwise", num_layers=4),
    Case("qwen", tp=2, sequence_parallel=True, gathered_inputs="keep", fp8="tensorwise", **SMALL),
    Case(
        "gpt",
        tp=2,
        pp=2,
        fp8="tensorwise",
        recompute=("selective", "uniform", 1),
        modules=("mlp", "attention"),
        **SMALL,
    ),
    Case("mla", tp=2, dp=2, sequence_parallel=True, fp8="tensorwise", **SMALL),
    Case("mla", tp=2, cp=2, fp8="tensorwise", **SMALL),
    Case("llama", dp=4, fp8="tensorwise", frozen=("layers.0.*", "*.q.weight"), **SMALL),
    Case("blocks_of_32", cp=2, dp=2, tp=2, fp8="mxfp8", micro_batch_size=2, **SMALL),
    Case("blocks_of_32", tp=2, fp8="tensorwise", offload=1, **SMALL),
    Case("blocks_of_128", tp=2, pp=2, sequence_parallel=True, fp8="blockwise", **SMALL),
]


@cache
def alone(case: Case) -> OracleResult:
    """Train on one process, with the microbatches of the case."""
    weights = weights_of(case.model, case.num_layers)
    result = run_case(0, case, weights, NUM_STEPS)
    return as_expected(result, weights)


def as_expected(result: RankResult, weights: Mapping[str, torch.Tensor]) -> OracleResult:
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    names = {piece.name for piece in result.grads}
    grads = assemble({name: shapes[name] for name in names}, result.grads, tolerance=0.0)
    masters = assemble(shapes, result.masters, tolerance=0.0)
    return OracleResult(result.loss_sum / result.num_tokens, grads, result.steps, masters, ())


def one_process(case: Case) -> Case:
    """Return the case on one rank, without what is a matter of layout."""
    return Case(
        case.model,
        num_layers=case.num_layers,
        global_batch_size=case.global_batch_size,
        micro_batch_size=case.micro_batch_size,
        frozen=case.frozen,
        fp8=case.fp8,
    )


def compare(case: Case) -> None:
    weights = weights_of(case.model, case.num_layers)
    results = run_ranks(run_case, case.world_size, case, weights, NUM_STEPS)
    check(results, alone(one_process(case)), weights, case)


@pytest.mark.distributed
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_layouts_have_the_numbers_of_one_process(case: Case) -> None:
    compare(case)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", COVERING_TOO, ids=str)
def test_more_layouts_have_the_numbers_of_one_process(case: Case) -> None:
    compare(case)


TRAFFIC = [
    Case("llama", tp=2, cp=2, sequence_parallel=True, fp8="tensorwise", recompute=("full", "uniform", 1), **SMALL),
    Case("mla", tp=2, pp=2, dp=2, sequence_parallel=True, fp8="tensorwise", **SMALL),
    Case("mla", tp=2, cp=2, fp8="tensorwise", **SMALL),
    Case("mla", tp=2, cp=2, sequence_parallel=True, fp8="tensorwise", fp8_gather=True, **SMALL),
    Case("qwen", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", fp8="tensorwise", fp8_gather=True, **SMALL),
    Case(
        "llama",
        tp=2,
        sequence_parallel=True,
        gathered_inputs="keep",
        recompute=("full", "block", 1),
        fp8="tensorwise",
        fp8_gather=True,
        frozen=("layers.1.mlp.*",),
        **SMALL,
    ),
    Case("deepseek", tp=2, dp=2, ep=2, sequence_parallel=True, fp8="tensorwise", fp8_gather=True, **SMALL),
    Case("llama", tp=2, pp=2, fp8="tensorwise", frozen=("embedding.*", "layers.0.*"), **SMALL),
    Case("blocks_of_32", tp=2, dp=2, fp8="mxfp8", **SMALL),
    Case("deepseek", tp=2, dp=2, ep=2, fp8="tensorwise", **SMALL),
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case", [case if case in TRAFFIC[:1] else pytest.param(case, marks=pytest.mark.slow) for case in TRAFFIC], ids=str
)
def test_maxima_equal_the_formula(case: Case) -> None:
    for rank, (measured, expected, _, differing) in enumerate(
        run_ranks(traffic_of_a_step, case.world_size, case, False)
    ):
        assert measured == expected, f"rank {rank}"
        assert differing == 0, f"rank {rank}: torch saw other calls than the ledger"
        has_maxima = any(flow.purpose == FP8_SCALES for flow in measured)
        assert has_maxima == str(case.fp8).startswith("tensorwise")


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_fp8_gives_other_gradients_than_the_run_s_dtype(recipe: str) -> None:
    case = Case("blocks_of_32", num_layers=2, global_batch_size=2, fp8=recipe)
    narrow, wide = alone(case), alone(replace(case, fp8=None))
    for name in ("layers.0.attention.q.weight", "layers.1.mlp.down.weight"):
        error = float((narrow.grads[name] - wide.grads[name]).norm() / wide.grads[name].norm())
        assert 0.005 < error < 0.3, f"{name}: {error}"
