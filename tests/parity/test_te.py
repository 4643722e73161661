"""Linear layers by Transformer Engine's GEMM, in each layout: its arguments, by a stand-in of its signature on the CPU."""

from dataclasses import replace

import pytest

from tests.parity.cases import Case
from tests.parity.test_parity import COVERING, COVERING_TOO, compare

IN_CI = [
    Case("gpt", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", num_layers=4, global_batch_size=5),
    Case("mqa_rope_bias", tp=4, sequence_parallel=True, num_layers=2, global_batch_size=2),
    Case("window", tp=2, sequence_parallel=True, attention="te", num_layers=2, global_batch_size=4),
]
"""Deferred gradients with biases; heads of keys that ranks share, so that matrices are apart; its attention too, with a window."""

FAMILIES = [
    Case("gpt_untied", tp=2, pp=2, schedule="zb_h1", num_layers=4, global_batch_size=4),
    Case("qwen", tp=2, dp=2, recompute=("full", "uniform", 1), num_layers=2, global_batch_size=4),
    Case(
        "gpt_untied", tp=2, sequence_parallel=True, recompute=("full", "uniform", 1), num_layers=2, global_batch_size=4
    ),
    Case(
        "gpt_untied",
        tp=2,
        recompute=("selective", "uniform", 1),
        modules=("activation",),
        num_layers=2,
        global_batch_size=4,
    ),
    Case("gpt_untied", dp=2, frozen=("*.up.bias", "layers.1.mlp.down.*"), offload=1, num_layers=2, global_batch_size=4),
    Case("qwen", tp=2, pp=2, attention="te", recompute=("selective", "uniform", 1), num_layers=2, global_batch_size=4),
    Case("mla", tp=2, dp=2, attention="te", num_layers=2, global_batch_size=4),
    Case("llama", cp=2, dp=2, cp_method="ulysses", attention="te", num_layers=2, global_batch_size=4),
    Case("mla", tp=2, sequence_parallel=True, num_layers=2, global_batch_size=4),
    Case("deepseek", tp=2, ep=2, dp=2, num_layers=2, global_batch_size=4),
    Case("ahead", tp=2, sequence_parallel=True, global_batch_size=4),
    Case("llama", cp=2, tp=2, num_layers=2, global_batch_size=4),
    Case("gpt", tp=2, frozen=("layers.0.*", "*.q.*"), num_layers=2, global_batch_size=4),
]


def by_te(cases: list[Case]) -> list[Case]:
    return [replace(case, linear="te") for case in cases]


@pytest.mark.distributed
@pytest.mark.parametrize("case", by_te(IN_CI), ids=str)
def test_layouts_equal_the_oracle(case: Case) -> None:
    compare(case, stand_in="te")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", by_te([*FAMILIES, *COVERING, *COVERING_TOO]), ids=str)
def test_more_layouts_equal_the_oracle(case: Case) -> None:
    compare(case, stand_in="te")
