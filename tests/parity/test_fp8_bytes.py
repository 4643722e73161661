"""Numbers that are kept in FP8 give the bits that numbers in the run's dtype give, when they are rounded where they are needed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case, Piece, RankResult, run_case, weights_of
from triaxis.engine.linear.fp8_gemms import Fp8Gemms
from triaxis.engine.linear.products import Operand

SMALL: dict[str, Any] = {"num_layers": 2, "global_batch_size": 2, "fp8": "tensorwise"}


def same_bits(one: RankResult, other: RankResult) -> bool:
    def by_name(pieces: list[Piece]) -> Mapping[tuple[str, int], torch.Tensor]:
        return {(piece.name, piece.start): piece.values for piece in pieces}

    pairs = [(by_name(one.grads), by_name(other.grads)), (by_name(one.masters), by_name(other.masters))]
    return one.steps == other.steps and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs
    )


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", dtype="bf16", **SMALL),
        pytest.param(Case("gpt", dtype="fp32", **SMALL), marks=pytest.mark.slow),
        pytest.param(Case("mla", dtype="bf16", **SMALL), marks=pytest.mark.slow),
        pytest.param(Case("qwen", recompute=("full", "uniform", 1), **SMALL), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_inputs_kept_in_fp8_change_no_bit(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(case.model, case.num_layers)
    whole_input, kept = Fp8Gemms.whole_input, list[torch.dtype]()

    def watched(self: Fp8Gemms, x: torch.Tensor) -> Operand:
        kept.append((result := whole_input(self, x)).tensor.dtype)
        return result

    monkeypatch.setattr(Fp8Gemms, "whole_input", watched)
    in_fp8 = run_case(0, case, weights, num_steps=2)
    assert torch.uint8 in kept
    monkeypatch.setattr(Fp8Gemms, "whole_input", lambda self, x: Operand(x, whole_input(self, x).scale))
    assert same_bits(in_fp8, run_case(0, case, weights, num_steps=2))


GATHERED = [
    Case("llama", tp=2, sequence_parallel=True, dtype="bf16", **SMALL),
    Case("qwen", tp=2, cp=2, sequence_parallel=True, recompute=("full", "uniform", 1), **SMALL),
    Case("mla", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", dtype="bf16", **SMALL),
    Case("deepseek", tp=2, dp=2, ep=2, sequence_parallel=True, gathered_inputs="keep", dtype="fp32", **SMALL),
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case", [GATHERED[0], *(pytest.param(case, marks=pytest.mark.slow) for case in GATHERED[1:])], ids=str
)
def test_numbers_that_travel_in_fp8_change_no_bit(case: Case) -> None:
    weights = weights_of(case.model, case.num_layers)
    in_dtype, in_fp8 = (
        run_ranks(run_case, case.world_size, replace(case, fp8_gather=gather), weights, 2) for gather in (False, True)
    )
    assert all(same_bits(one, other) for one, other in zip(in_dtype, in_fp8, strict=True))
