"""Memory of layers with experts: the formula against live tensors of a footprint, in layouts and under laws of routing."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
import torch

from tests.harness import run_ranks
from tests.models.predict.test_rank_memory import most_kept
from tests.parity.cases import Case
from triaxis.engine.config.quantities.expert_rows import worst_rows
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.expert_parallel import experts
from triaxis.launch.footprint.routing import Counts, choices_of_step, known_rows
from triaxis.launch.footprint.run import Footprint, Footprints
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.activation_memory import kept_bytes, moved_bytes
from triaxis.models.predict.experts.memory import BALANCED, worst_load
from triaxis.models.predict.rank_memory import predict
from triaxis.models.predict.traffic import expected_traffic, measured_traffic

LARGEST_GAP = 0.02
"""Largest distance of the bytes of all tensors at the fullest moment from the predicted ones, over those."""

CI = [
    Case(
        "deepseek",
        pp=2,
        tp=2,
        ep=2,
        sequence_parallel=True,
        schedule="zb_h1",
        num_layers=2,
        layers_per_stage=(1, 1),
        global_batch_size=6,
        dtype="bf16",
    ),
]
SLOW = [
    Case("deepseek", tp=2, dp=2, ep=2, etp=2, dispatch="all_to_all", num_layers=2, global_batch_size=2, dtype="bf16"),
    Case("deepseek", dp=2, ep=2, micro_batch_size=2, global_batch_size=4, dtype="bf16"),
    Case("deepseek", dp=2, ep=2, dispatch="all_to_all", micro_batch_size=2, global_batch_size=8, dtype="bf16"),
    Case("deepseek", tp=2, ep=2, sequence_parallel=True, gathered_inputs="keep", global_batch_size=2),
    Case("deepseek", tp=2, ep=2, global_batch_size=2, dtype="bf16"),
    Case("deepseek", pp=2, dp=2, ep=2, dispatch="all_to_all", recompute=("full", "uniform", 2), global_batch_size=4),
    Case(
        "moe losses", tp=2, cp=2, ep=4, num_layers=4, sequence_parallel=True, dispatch="all_to_all", global_batch_size=2
    ),
    Case(
        "moe",
        pp=2,
        num_layers=4,
        dp=2,
        ep=2,
        recompute=("selective", "uniform", 1),
        modules=("norm", "activation", "mlp"),
        offload=1,
        global_batch_size=4,
        dtype="bf16",
    ),
    Case("moe gelu", pp=2, vpp=2, dp=2, ep=2, schedule="zbv", num_layers=4, global_batch_size=8, dispatch="all_to_all"),
    Case("moe", pp=2, tp=2, ep=2, schedule="zb_h1", num_layers=4, global_batch_size=4, dtype="bf16"),
]


def footprints(rank: int, cases: Sequence[Case]) -> list[list[tuple[Footprint, Counts | None]]]:
    """The ranks at the head of tp and dp, with the assumed choices, in a process without a group of its own."""
    made = [Footprints(case.config(), build_chunks) for case in cases]
    return [
        [(found, each.counts_of(each.grid.rank(pp=pp))) for pp, found in enumerate(each.of_stages())] for each in made
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("cases", [pytest.param(CI, id="ci"), pytest.param(SLOW, id="rest", marks=pytest.mark.slow)])
def test_a_step_keeps_and_sends_what_was_predicted(cases: Sequence[Case]) -> None:
    (all_found,) = run_ranks(footprints, 1, cases, timeout_seconds=600)
    for case, ranks in zip(cases, all_found, strict=True):
        config = case.config()
        sizes, stages = parallel_sizes(config), stages_of(config)
        predicted = predict(config, sizes).ranks
        for found, counts in ranks:
            memory = predicted[found.coordinates.pp]
            state = {"parameters": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
            assert state == found.state, str(case)
            kept = [
                kept_bytes(config, sizes, stages[one]) + moved_bytes(config, sizes, stages[one]) for one in found.stages
            ]
            assert sum(one.num_bytes for one in found.saved) == sum(kept), str(case)
            least, most = most_kept(config, found)
            assert least <= memory.activations <= most, str(case)
            # Elsewhere a dense layer's operators make the fullest moment.
            assert not memory.temporaries or abs(found.peak.total / memory.tensors - 1) <= LARGEST_GAP, str(case)
            assert counts is not None
            choices = choices_of_step(counts, config, found.num_microbatches)
            assert measured_traffic(found.events) == expected_traffic(config, sizes, found.coordinates, stages, choices)


LAW_CASE = Case(
    "deepseek", dp=4, ep=4, num_layers=2, micro_batch_size=2, global_batch_size=8, dispatch="all_to_all", dtype="bf16"
)
LAWS = [(zipf, seed) for zipf in (0.0, 0.5, 1.0, 1.5, 2.5, 9.0, 40.0) for seed in range(3)]
"""The exponent of experts' popularity, from none to all tokens on the same, and a seed that orders the experts."""


def counts_of_law(config: Config, zipf: float, seed: int) -> Counts:
    """Draw each token's k different experts, number i of a random order with weight (i + 1)^-zipf."""
    moe, random = config.model.moe, Random(seed)
    assert moe is not None
    order = random.sample(range(moe.num_experts), moe.num_experts)
    counts = [[0] * moe.num_experts for _ in range(config.parallel.ep)]
    for of_rank in counts:
        for _ in range(config.train.micro_batch_size * config.model.seq_length):
            keys = {expert: random.random() ** ((place + 1) ** zipf) for place, expert in enumerate(order)}
            for expert in sorted(keys, key=lambda one: -keys[one])[: moe.top_k]:
                of_rank[expert] += 1
    return counts


def load_of(case: Case, law: tuple[float, int]) -> Fraction:
    """The load of the first rank's experts."""
    config = case.config()
    grid = Footprints(config, build_chunks).grid
    rows = sum(sum(of_member) for of_member in known_rows(counts_of_law(config, *law), grid, 0).from_members)
    assert config.model.moe is not None
    return Fraction(rows, config.model.moe.top_k * config.train.micro_batch_size * config.model.seq_length)


def gap(case: Case, law: tuple[float, int], footprint: Footprint) -> float:
    config = case.config()
    predicted = predict(config, parallel_sizes(config), load=load_of(case, law)).fullest
    return footprint.peak.total / predicted.tensors - 1


def under_laws(rank: int, case: Case, laws: Sequence[tuple[float, int]]) -> list[Footprint]:
    config = case.config()
    return [Footprints(config, build_chunks, counts=counts_of_law(config, *law)).of(0) for law in laws]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dtype", "laws"),
    [
        pytest.param("bf16", LAWS[-1:], id="ci"),
        pytest.param("bf16", LAWS, id="all", marks=pytest.mark.slow),
        pytest.param("float64", LAWS, id="all, float64", marks=pytest.mark.slow),
    ],
)
def test_rows_by_all_to_all_are_held_by_the_load_of_any_routing(dtype: str, laws: Sequence[tuple[float, int]]) -> None:
    """Compare what is kept and sent, exactly, and all tensors at the fullest moment."""
    case = replace(LAW_CASE, dtype=dtype)
    config = case.config()
    sizes = parallel_sizes(config)
    (found,) = run_ranks(under_laws, 1, case, laws, timeout_seconds=600)
    loads = []
    for law, footprint in zip(laws, found, strict=True):
        loads.append(load := load_of(case, law))
        held = footprint.most["activations"] + footprint.most["logits"]
        assert predict(config, sizes, load=load).fullest.activations == held, law
        assert abs(gap(case, law, footprint)) <= LARGEST_GAP, law
        assert load <= worst_load(config, sizes)
        choices = choices_of_step(counts_of_law(config, *law), config, footprint.num_microbatches)
        expected = expected_traffic(config, sizes, footprint.coordinates, stages_of(config), choices)
        assert measured_traffic(footprint.events) == expected, law
    assert len(laws) == 1 or (min(loads) < Fraction(1, 2) and max(loads) > Fraction(3, 2)), loads


def gathered(rank: int, cases: Sequence[Case]) -> list[Footprint]:
    return [each for case in cases for each in under_laws(rank, case, LAWS[:1])]


@pytest.mark.distributed
@pytest.mark.slow
def test_the_fullest_moment_of_an_all_gather_is_as_predicted() -> None:
    cases = [replace(LAW_CASE, dispatch="all_gather", dtype=dtype) for dtype in ("bf16", "fp32", "float64")]
    (found,) = run_ranks(gathered, 1, cases)
    for case, footprint in zip(cases, found, strict=True):
        assert abs(gap(case, LAWS[0], footprint)) <= LARGEST_GAP, str(case)


def with_one_tensor_more(rank: int, case: Case, num_bytes: int) -> Footprint:
    """The second projection's backward has a tensor that it would not need."""
    exact = experts._weighted_backward

    def planted(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        more = torch.empty(num_bytes, dtype=torch.uint8)
        gradients = exact(*operands)
        del more
        return gradients

    experts._weighted_backward = planted
    return under_laws(rank, case, LAWS[-1:])[0]


@pytest.mark.distributed
def test_a_temporary_tensor_of_4_percent_would_be_seen() -> None:
    config = LAW_CASE.config()
    num_bytes = predict(config, parallel_sizes(config)).fullest.tensors // 25
    (found,) = run_ranks(with_one_tensor_more, 1, LAW_CASE, num_bytes)
    assert gap(LAW_CASE, LAWS[-1], found) > LARGEST_GAP


def test_no_routing_holds_more_than_the_worst_case() -> None:
    config = LAW_CASE.config()
    sizes, moe = parallel_sizes(config), config.model.moe
    assert moe is not None
    tokens = config.train.micro_batch_size * config.model.seq_length
    # Each token has at most E / e = 2 of its 3 experts on one rank, and 4 ranks send.
    assert worst_load(config, sizes) == Fraction(4 * 2, 3)
    assert worst_rows(moe, tokens, sizes.ep, sizes.etp) == 4 * 2 * tokens
    loads = [Fraction(0), BALANCED, worst_load(config, sizes), Fraction(100)]
    none, balanced, worst, more = (predict(config, sizes, load=load).fullest.activations for load in loads)
    assert none < balanced < worst == more


STATIC_CASE = Case("deepseek", dp=4, ep=4, num_layers=2, global_batch_size=4, dispatch="all_gather", dtype="bf16")


def test_headroom_of_an_all_gather_bounds_the_rows_that_are_kept() -> None:
    config = STATIC_CASE.config()
    sizes, moe = parallel_sizes(config), config.model.moe
    assert moe is not None

    def held(headroom: float | None) -> int:
        changed = moe.model_copy(update={"row_headroom": headroom})
        model = config.model.model_copy(update={"moe": changed})
        return predict(config.model_copy(update={"model": model}), sizes).fullest.activations

    assert held(1.0) < held(2.0) < held(None)
    # One layer's rows: an index, input, gate and up, activated, weight.
    tokens, row = config.model.seq_length, 8 + 2 * (16 + 2 * 8 + 8) + 4
    assert held(2.0) - held(1.0) == moe.top_k * tokens * row


def test_any_load_is_the_same_where_the_buffer_is_fixed() -> None:
    config = STATIC_CASE.config()
    sizes = parallel_sizes(config)
    assert predict(config, sizes, load=Fraction(5)) == predict(config, sizes)
