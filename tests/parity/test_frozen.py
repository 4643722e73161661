"""Frozen parameters: weights after three steps equal the oracle's, in covering layouts, and what is frozen keeps its bits."""

import pytest

from tests.harness import run_ranks
from tests.parity.cases import Case, run_case, run_oracle, weights_of
from tests.parity.test_parity import check, compare
from tests.parity.test_step_properties import traffic_of_a_step

LOWER = ("embedding.*", "layers.[0-1].*")
"""The lower part of a model: its backward ends at layer 2."""

ALONE = [
    Case("gpt", num_layers=4, frozen=LOWER, global_batch_size=2),
    Case("llama", num_layers=3, frozen=("embedding.*", "*norm.weight"), global_batch_size=2),
    Case("llama", num_layers=3, frozen=("layers.*",), global_batch_size=2),
    Case(
        "qwen", num_layers=3, frozen=("*.q.weight", "*.kv.bias", "*norm.weight", "*.down.weight"), global_batch_size=2
    ),
    Case("gpt_untied", num_layers=2, frozen=("*.word.weight", "layers.*", "final_norm.*"), global_batch_size=2),
    Case(
        "gpt_untied",
        num_layers=2,
        frozen=("head.weight", "*.position.weight", "*.up.*", "*.proj.bias"),
        global_batch_size=2,
    ),
    Case("gpt_untied", num_layers=2, frozen=("head.weight",), head_tokens=5, global_batch_size=2),
    Case("ahead deepseek", num_layers=4, frozen=(*LOWER, "*.router.*", "*.up.weight"), global_batch_size=2),
    Case(
        "ahead deepseek",
        num_layers=4,
        frozen=("embedding.*", "layers.[0-3].*", "final_norm.*", "head.*"),
        global_batch_size=2,
    ),
    Case("mla", num_layers=3, frozen=("embedding.*", "*_a.weight", "*_a_norm.weight"), global_batch_size=2),
]


@pytest.mark.parametrize(
    "case", [case if case in ALONE[:4] else pytest.param(case, marks=pytest.mark.slow) for case in ALONE], ids=str
)
def test_one_process_equals_the_oracle(case: Case) -> None:
    weights = weights_of(case.model, case.num_layers)
    check([run_case(0, case, weights, 3)], run_oracle(case, weights, 3), weights, case)


SMALL = {"num_layers": 4, "global_batch_size": 4}


LAYOUTS = [
    Case("gpt", pp=2, vpp=2, dp=2, frozen=("embedding.*", "layers.[0-1].*", "*norm.weight"), num_layers=4),
    Case("llama", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", frozen=(*LOWER, "*.up.*"), **SMALL),
    Case("gpt_untied", tp=2, pp=2, sequence_parallel=True, frozen=LOWER, bucket_bytes=300, **SMALL),
    Case("gpt", pp=4, frozen=("layers.*",), **SMALL),
    Case("gpt_untied", pp=4, schedule="gpipe", frozen=("embedding.*", "layers.[0-2].*"), **SMALL),
    Case("llama", dp=4, frozen=("embedding.*", "layers.1.*", "*.q.weight"), num_layers=3),
    Case("llama", cp=2, dp=2, frozen=("embedding.*", "*.kv.weight"), num_layers=3, global_batch_size=2),
    Case(
        "qwen",
        tp=8,
        sequence_parallel=True,
        frozen=("*.q.weight", "*.q_norm.weight", "*.down.weight"),
        num_layers=2,
    ),
    Case("llama", pp=4, schedule="zb_h1", frozen=(*LOWER, "*.up.*"), num_layers=4, global_batch_size=8),
    Case(
        "llama",
        tp=2,
        pp=2,
        schedule="zb_h1",
        sequence_parallel=True,
        frozen=("*.proj.weight", "layers.1.mlp.*"),
        **SMALL,
    ),
    Case("gpt_untied", pp=2, vpp=2, dp=2, schedule="zbv", frozen=LOWER, num_layers=4),
    Case(
        "gpt_dropout",
        tp=2,
        pp=2,
        frozen=("embedding.*", "layers.[0-2].*"),
        recompute=("full", "uniform", 2),
        **SMALL,
    ),
    Case(
        "llama",
        pp=2,
        frozen=("embedding.*", "layers.[0-1].*", "*.up.*"),
        recompute=("selective", "uniform", 1),
        modules=("norm", "rope", "activation", "mlp", "attention"),
        offload=3,
        num_layers=6,
        global_batch_size=4,
    ),
    Case("ahead deepseek", dp=4, ep=2, tp=2, num_layers=4, frozen=(*LOWER, "*.experts.up.*"), bucket_bytes=1),
    Case(
        "gpt_untied",
        tp=2,
        head_tokens=3,
        sequence_parallel=True,
        frozen=("head.weight", "*.kv.*"),
        num_layers=2,
        global_batch_size=2,
    ),
    Case(
        "llama",
        pp=3,
        num_layers=2,
        layers_per_stage=(1, 0, 1),
        global_batch_size=3,
        frozen=("embedding.*", "layers.0.*"),
    ),
    Case("qwen", tp=2, sequence_parallel=True, gathered_inputs="keep", frozen=("*.up.*", "*.kv.weight"), **SMALL),
]
"""The first two are in the CI tier."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case", [case if case in LAYOUTS[:2] else pytest.param(case, marks=pytest.mark.slow) for case in LAYOUTS], ids=str
)
def test_layouts_equal_the_oracle(case: Case) -> None:
    compare(case)


TRAFFIC = [
    Case("qwen", tp=2, dp=2, frozen=("embedding.*", "layers.0.*", "*.q.weight"), num_layers=3, bucket_bytes=500),
    Case("gpt_untied", tp=2, pp=2, sequence_parallel=True, frozen=(*LOWER, "*.up.weight"), bucket_bytes=2000, **SMALL),
    Case(
        "gpt_untied",
        tp=2,
        pp=4,
        dp=1,
        sequence_parallel=True,
        frozen=(*LOWER, "*.up.weight"),
        bucket_bytes=300,
        **SMALL,
    ),
    Case("gpt_untied", tp=2, sequence_parallel=True, frozen=("head.weight", "embedding.word.*"), num_layers=2, dp=2),
    Case("gpt_untied", tp=2, sequence_parallel=True, frozen=("head.weight", "*norm.*"), head_tokens=3, num_layers=2),
    Case(
        "gpt",
        tp=2,
        pp=2,
        sequence_parallel=True,
        schedule="zb_h1",
        frozen=("*.proj.weight", "layers.1.mlp.*"),
        num_layers=4,
    ),
    Case("gpt_untied", tp=2, pp=2, vpp=2, schedule="zbv", frozen=("embedding.*", "layers.0.*"), **SMALL),
    Case("llama", cp=2, pp=2, frozen=LOWER, recompute=("full", "block", 2), num_layers=6, global_batch_size=3),
    Case(
        "mla",
        tp=2,
        sequence_parallel=True,
        frozen=("embedding.*", "layers.0.*", "*.q_b.weight", "*.down.*"),
        num_layers=3,
    ),
    Case(
        "ahead deepseek",
        tp=2,
        dp=2,
        ep=2,
        frozen=(*LOWER, "*.experts.up.*"),
        recompute=("full", "block", 1),
        num_layers=4,
    ),
    Case("deepseek", tp=2, dp=2, ep=2, dispatch="all_to_all", frozen=("embedding.*", "layers.[0-2].*"), num_layers=6),
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case", [case if case in TRAFFIC[:2] else pytest.param(case, marks=pytest.mark.slow) for case in TRAFFIC], ids=str
)
def test_bytes_and_calls_equal_the_formulas(case: Case) -> None:
    for rank, (measured, expected, num_calls, differing) in enumerate(
        run_ranks(traffic_of_a_step, case.world_size, case, False)
    ):
        assert measured == expected, f"rank {rank}"
        assert num_calls > 0 and differing == 0
