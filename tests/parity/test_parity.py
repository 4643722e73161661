"""A layout is only a matter of speed: loss, every gradient and the weights after three steps equal the oracle's.

The CI tier has a covering set of small cases: every axis alone, pairs of them, and all together on eight ranks; every schedule,
uneven stages, sequence parallelism, replicated kv heads, tied and untied embeddings, dropout, every kind of recomputation,
heads in pieces, gathered inputs that are kept, offload, transfers through other memory, explicit attention whose head_dim is not
hidden_size / heads; loss masks are in all of them. The slow tier adds the product of the axes at the models' full depth, more
cases of eight ranks, and compiled kernels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest
import torch

from tests.harness import compiler, run_ranks
from tests.parity.cases import Case, OracleResult, RankResult, assemble, is_trained, run_case, run_oracle, weights_of
from tests.stand_in import with_stand_in

NUM_STEPS = 3
"""The third update is the first that follows from two others; the lr falls from the first to it."""

SMALL: dict[str, Any] = {"num_layers": 2, "global_batch_size": 4}
SMALL_STAGES: dict[str, Any] = {"num_layers": 4, "global_batch_size": 4}

SELECTIVE = ("selective", "uniform", 1)
FULL_BY_TWO = ("full", "uniform", 2)
CHEAP = ("norm", "activation")
CHEAP_WITH_ROPE = ("norm", "rope", "activation")
ALL_PARTS = ("norm", "rope", "activation", "mlp", "attention")

COVERING = [
    Case("gpt", **SMALL),
    Case("llama", **SMALL),
    Case("qwen", **SMALL),
    Case("gpt_untied", tp=2, **SMALL),
    Case("geglu", tp=2, sequence_parallel=True, **SMALL),
    Case("gpt", tp=2, sequence_parallel=True, **SMALL),
    Case("gpt", pp=2, num_layers=4, global_batch_size=4),
    Case("gpt", dp=4, num_layers=2),
    Case("gpt", pp=2, vpp=2, num_layers=4, global_batch_size=4),
    Case("gpt", vpp=2, schedule="interleaved", num_layers=4, global_batch_size=4),
    Case("gpt", pp=4, schedule="gpipe", num_layers=4, global_batch_size=6),
    Case("llama", pp=8),
    Case("mqa_rope_bias", tp=2, dp=2, micro_batch_size=2, num_layers=2),
    Case("qwen", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, **SMALL_STAGES),
    Case("qwen", tp=8, sequence_parallel=True, num_layers=1, global_batch_size=2),
    Case("gpt", pp=2, vpp=4, global_batch_size=3),
    Case("llama", pp=3, num_layers=2, layers_per_stage=(1, 0, 1), global_batch_size=3),
    Case("gpt_untied", pp=4, layers_per_stage=(1, 3, 2, 2), global_batch_size=6),
    Case("gpt_large_head", pp=2, vpp=2, layers_per_stage="auto", num_layers=6, global_batch_size=4),
    Case("llama", pp=2, vpp=2, layers_per_stage=(2, 1, 3, 2), recompute=FULL_BY_TWO, global_batch_size=4),
    Case("gpt", tp=2, dp=2, recompute=SELECTIVE, bucket_bytes=1, **SMALL),
    Case("gpt_dropout", tp=2, pp=2, sequence_parallel=True, recompute=("full", "uniform", 1), **SMALL_STAGES),
    Case("gpt_dropout", dp=2, micro_batch_size=2, num_layers=2),
    Case("qwen", attention="explicit", **SMALL),
    Case("qwen", tp=2, pp=2, vpp=2, recompute=SELECTIVE, modules=ALL_PARTS, offload=1, **SMALL_STAGES),
    Case(
        "gpt_dropout", tp=2, pp=2, sequence_parallel=True, recompute=SELECTIVE, modules=CHEAP, offload=2, **SMALL_STAGES
    ),
    Case("llama", pp=2, recompute=("full", "block", 2), modules=CHEAP_WITH_ROPE, offload=3, global_batch_size=4),
    Case("gpt", tp=2, dp=2, optimizer="sgd", **SMALL),
    Case("llama", tp=2, sequence_parallel=True, staged=True, **SMALL),
    Case("gpt", tp=2, pp=2, staged=True, **SMALL_STAGES),
    Case("gpt", pp=2, dp=2, vpp=2, staged=True, **SMALL_STAGES),
    Case("gpt", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", num_layers=4, global_batch_size=5),
    Case("llama", pp=2, dp=2, schedule="zb_h1", micro_batch_size=2, bucket_bytes=1, num_layers=4, global_batch_size=12),
    Case("gpt", tp=2, pp=2, vpp=2, sequence_parallel=True, schedule="zbv", num_layers=4, global_batch_size=5),
    Case("gpt", pp=4, vpp=2, schedule="zbv", global_batch_size=9),
    Case(
        "llama", pp=2, vpp=2, dp=2, schedule="zbv", layers_per_stage=(2, 1, 3, 2), bucket_bytes=1, global_batch_size=8
    ),
    Case(
        "gpt",
        tp=2,
        pp=2,
        sequence_parallel=True,
        schedule="mixed_schedule.txt",
        num_layers=4,
        global_batch_size=5,
    ),
    Case("llama", head_tokens=5, **SMALL),
    # 4,608 tokens: three pieces.
    Case("mqa_rope_bias", tp=2, sequence_parallel=True, micro_batch_size=576, num_layers=1, global_batch_size=1152),
    Case("gpt", tp=2, dp=2, micro_batch_size=2, head_tokens=7, num_layers=2),
    Case("mqa_rope_bias", tp=2, pp=2, sequence_parallel=True, head_tokens=1, **SMALL),
    Case("qwen", tp=2, sequence_parallel=True, gathered_inputs="keep", **SMALL),
    Case("mqa_rope_bias", tp=4, sequence_parallel=True, head_tokens=3, gathered_inputs="keep", **SMALL),
    Case(
        "llama",
        tp=2,
        pp=2,
        sequence_parallel=True,
        recompute=("full", "block", 1),
        gathered_inputs="keep",
        **SMALL_STAGES,
    ),
]
"""As deep and with as many microbatches as there is something to go wrong in."""

COVERING_TOO = [
    Case("mqa_rope_bias", tp=4, pp=2, sequence_parallel=True, head_tokens=1, **SMALL),
    Case("mqa_rope_bias", tp=4, pp=2, sequence_parallel=True, **SMALL),
    Case("gpt_large_head", tp=2, pp=2, vpp=2, layers_per_stage="auto", num_layers=6, global_batch_size=4),
    Case("llama", pp=2, vpp=2, tp=2, layers_per_stage=(2, 1, 3, 2), recompute=FULL_BY_TWO, global_batch_size=4),
    Case("gpt", tp=2, pp=2, dp=2, recompute=SELECTIVE, bucket_bytes=1, num_layers=4),
    Case("gpt_dropout", tp=2, pp=2, dp=2, sequence_parallel=True, recompute=("full", "uniform", 1), num_layers=4),
    Case("gpt", pp=2, vpp=4, dp=2, global_batch_size=6),
    Case("gpt", tp=2, pp=2, dp=2, optimizer="sgd", num_layers=4),
    Case("llama", pp=4, dp=2, schedule="zb_h1", micro_batch_size=2, bucket_bytes=1, num_layers=4, global_batch_size=24),
    Case("gpt", pp=4, schedule="zb_h1", staged=True),
    Case("qwen", tp=2, pp=2, cp=2, schedule="zb_h1", recompute=SELECTIVE, modules=CHEAP, documents=True),
    Case("kinds_dropout", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", gathered_inputs="keep", offload=2),
    Case("llama", tp=2, pp=2, schedule="zb_h1", head_tokens=5, recompute=SELECTIVE, modules=("mlp", "attention")),
    Case("parallel gpt", pp=2, schedule="zb_h1", num_layers=4, optimizer="sgd"),
    Case("gpt", pp=4, vpp=2, dp=2, schedule="zbv", staged=True),
    Case("gpt_dropout", vpp=2, schedule="zbv", num_layers=4),
    Case("qwen", tp=2, pp=2, vpp=2, cp=2, schedule="zbv", recompute=SELECTIVE, modules=CHEAP, documents=True),
    Case("kinds_dropout", tp=2, pp=2, vpp=2, sequence_parallel=True, schedule="zbv", gathered_inputs="keep", offload=2),
    Case("llama", tp=2, pp=2, vpp=2, schedule="zbv", head_tokens=5, recompute=SELECTIVE, modules=("mlp", "attention")),
    Case("llama", tp=8),
    Case("llama", tp=4, dp=2, sequence_parallel=True),
    Case("gpt", pp=4, vpp=2, dp=2, global_batch_size=10),
    Case("qwen", tp=2, pp=2, dp=2, sequence_parallel=True, recompute=("full", "block", 1)),
    Case("gpt_dropout", tp=4, pp=2, vpp=2, recompute=("selective", "uniform", 1)),
    Case("qwen", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, num_layers=4, gathered_inputs="keep"),
    Case("gpt", tp=8, sequence_parallel=True, recompute=FULL_BY_TWO, gathered_inputs="keep"),
    Case(
        "gpt_dropout",
        tp=2,
        pp=2,
        dp=2,
        sequence_parallel=True,
        recompute=SELECTIVE,
        modules=("activation", "attention"),
        offload=1,
        gathered_inputs="keep",
    ),
]
"""Of eight ranks, and each thing in them is in a case above as well."""


def full_product() -> list[Case]:
    """Every legal layout with at most 8 ranks; three models take turns."""
    powers = (1, 2, 4, 8)
    models = cycle(("gpt", "llama", "qwen"))
    cases = []
    for tp, pp, dp, vpp, sequence_parallel in product(powers, powers, powers, (1, 2, 4), (False, True)):
        if tp * pp * dp > 8 or pp * vpp > 8:
            continue
        recompute = ("full", "uniform", 1) if (tp + pp + dp + vpp) % 2 else ("none", "uniform", 1)
        for schedule in ("interleaved",) if vpp > 1 else ("1f1b", "gpipe"):
            cases.append(Case(next(models), tp, pp, vpp, dp, sequence_parallel, schedule, 8, 1, recompute))
    return cases


@cache
def oracle(case: Case, num_steps: int) -> OracleResult:
    return run_oracle(case, weights_of(case.model, case.num_layers), num_steps)


def compare(case: Case, num_steps: int = NUM_STEPS, stand_in: str | None = None) -> None:
    """Hold a layout to the oracle; `stand_in` names the package of `tests/stand_ins` that its ranks import."""
    alone = Case(
        case.model,
        num_layers=case.num_layers,
        global_batch_size=case.global_batch_size,
        optimizer=case.optimizer,
        documents=case.documents,
        groups=case.groups,
        frozen=case.frozen,
    )
    expected = oracle(alone, num_steps)
    weights = weights_of(case.model, case.num_layers)
    results = run_ranks(
        *((run_case, case.world_size) if stand_in is None else (with_stand_in, case.world_size, stand_in, run_case)),
        case,
        weights,
        num_steps,
        device=case.device,
        staged=case.staged,
        backend=case.backend,
    )
    check(results, expected, weights, case)


def check(
    results: Sequence[RankResult],
    expected: OracleResult,
    weights: Mapping[str, torch.Tensor],
    case: Case | None = None,
) -> None:
    """Losses, norms of each step, every gradient of the first and the weights after the last; what `case` freezes has kept its."""
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}

    (tokens,) = {result.num_tokens for result in results}
    assert sum(result.loss_sum for result in results) / tokens == pytest.approx(expected.loss, rel=1e-12)
    for result in results:
        for got, want in zip(result.steps, expected.steps, strict=True):
            assert got == pytest.approx(want, rel=1e-9)
        # What is reported of tokens ahead, which no gradient shows.
        assert result.ahead == pytest.approx(expected.ahead, rel=1e-12)

    # A key bias has a gradient of exactly zero in theory, so the tolerance is relative to the tensor or to its share of all.
    trained = {name: shape for name, shape in shapes.items() if is_trained(name, case)}
    assert trained.keys() == expected.grads.keys()
    grads = assemble(trained, [piece for result in results for piece in result.grads], tolerance=1e-12)
    everything = sum(float(grad.square().sum()) for grad in expected.grads.values()) ** 0.5
    for name, want in expected.grads.items():
        error = float((grads[name] - want).norm())
        assert error <= 1e-10 * max(float(want.norm()), everything / len(shapes) ** 0.5), f"{name}: {error}"

    masters = assemble(shapes, [piece for result in results for piece in result.masters], tolerance=1e-12)
    for name, want in expected.weights.items():
        assert float((masters[name] - want).abs().max()) <= 1e-9, name
    for pattern in () if case is None else case.frozen:
        assert all(masters[name].equal(weights[name]) for name in shapes if fnmatchcase(name, pattern)), pattern


@pytest.mark.distributed
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", COVERING_TOO, ids=str)
def test_more_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", full_product(), ids=str)
def test_every_layout_of_at_most_8_ranks_equals_the_oracle(case: Case) -> None:
    compare(case, num_steps=1)


@pytest.mark.distributed
@pytest.mark.slow
@compiler()
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", pp=2, compiled=True),
        Case("qwen", tp=2, pp=2, vpp=2, sequence_parallel=True, recompute=("full", "uniform", 1), compiled=True),
        Case("gpt_dropout", tp=2, recompute=("selective", "uniform", 1), compiled=True),
    ],
    ids=str,
)
def test_compiled_kernels_equal_the_oracle(case: Case) -> None:
    compare(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", device="cuda"),
        Case("qwen", device="cuda", compiled=True),
        Case("gpt_dropout", recompute=("selective", "uniform", 1), device="cuda", compiled=True),
        Case("qwen", vpp=2, recompute=("full", "uniform", 1), device="cuda"),
        Case("gpt_dropout", recompute=("selective", "uniform", 1), device="cuda"),
        Case("qwen", vpp=2, recompute=SELECTIVE, modules=ALL_PARTS, offload=3, device="cuda"),
        Case("gpt_dropout", recompute=("full", "uniform", 2), offload=8, device="cuda"),
        Case("llama", tp=2, sequence_parallel=True, device="cuda"),
        Case("gpt", pp=2, vpp=2, device="cuda"),
        Case("qwen", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, device="cuda"),
    ],
    ids=str,
)
def test_gpus_equal_the_oracle(case: Case) -> None:
    if torch.cuda.device_count() < case.world_size:
        pytest.skip(f"needs {case.world_size} GPUs; this machine shows {torch.cuda.device_count()}")
    compare(case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", dp=2, device="cuda", staged=True),
        Case("llama", tp=2, sequence_parallel=True, device="cuda", staged=True),
        Case("gpt", tp=2, pp=2, device="cuda", staged=True),
        Case("gpt", pp=2, vpp=2, dp=2, device="cuda", staged=True),
        Case("gpt_dropout", tp=2, dp=2, recompute=("selective", "uniform", 1), device="cuda", staged=True),
        Case("mqa_rope_bias", tp=4, device="cuda", staged=True),
        Case("qwen", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, device="cuda", staged=True),
    ],
    ids=str,
)
def test_ranks_that_share_a_gpu_equal_the_oracle(case: Case) -> None:
    """Over gloo, through pinned memory: the streams and the allocator are those of a real run, the wires are not."""
    compare(case)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering_layouts_on_shared_gpus_equal_the_oracle(case: Case) -> None:
    compare(replace(case, device="cuda", staged=True))
