"""Routings at the edge: all tokens to one expert, none to another, ties, too small a buffer, labels masked on a whole rank."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

import tests.parity.cases as cases
from tests.harness import run_ranks
from tests.parity.cases import (
    Case,
    Piece,
    RankResult,
    assemble,
    build_rank,
    dataset,
    is_trained,
    load_weights,
    run_case,
    run_oracle,
    weights_of,
)
from tests.parity.test_parity import check
from triaxis.engine.checkpoint.shards import fingerprint
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.data.samples import Sample
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.errors import DivergenceError
from triaxis.engine.train import build
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

Weights = Mapping[str, torch.Tensor]
BOTH = ("all_gather", "all_to_all")
SLOW = pytest.mark.slow


def weights_with(case: Case, part: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights of the parity tests with `part` of every router replaced."""
    found = {name: weight.detach().clone() for name, weight in weights_of(case.model, case.num_layers).items()}
    for name, weight in found.items():
        if name.endswith(f"router.{part}"):
            weight.copy_(values)
    return found


def compare_with(case: Case, weights: Weights, num_steps: int) -> list[RankResult]:
    alone = Case(case.model, num_layers=case.num_layers, global_batch_size=case.global_batch_size)
    if case.world_size == 1:
        results = [run_case(0, case, weights, num_steps)]
    else:
        results = run_ranks(run_case, case.world_size, case, weights, num_steps)
    check(results, run_oracle(alone, weights, num_steps), weights)
    return results


# Forced choices -----------------------------------------------------------------------------------------------------------

PREFERENCES = {"moe biased": [50.0, 100.0, 0.0, -100.0], "moe one biased": [0.0, 0.0, 0.0, 100.0]}
"""Biases of the choice. Experts 0 and 1 get every token, or expert 3 does: with two ranks, one has no rows."""
CHOSEN = {"moe biased": {0, 1}, "moe one biased": {3}}


def gradients_of(results: list[RankResult], weights: Weights) -> dict[str, torch.Tensor]:
    shapes = {name: tuple(weight.shape) for name, weight in weights.items() if is_trained(name)}
    pieces: list[Piece] = [piece for result in results for piece in result.grads]
    return assemble(shapes, pieces, tolerance=1e-12)


@pytest.mark.parametrize(
    ("layout", "dispatch"),
    [
        pytest.param({}, "all_gather", id="one rank"),
        pytest.param({"dp": 2, "ep": 2}, "all_gather", marks=pytest.mark.distributed, id="ep2 all_gather"),
        pytest.param({"dp": 2, "ep": 2}, "all_to_all", marks=pytest.mark.distributed, id="ep2 all_to_all"),
        *(
            pytest.param(layout, dispatch, marks=[pytest.mark.distributed, SLOW])
            for dispatch in BOTH
            for layout in (
                {"dp": 4, "ep": 4},
                {"tp": 2, "etp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
                {"pp": 2, "dp": 2, "ep": 2, "recompute": ("full", "uniform", 1)},
            )
        ),
    ],
)
@pytest.mark.parametrize("model", PREFERENCES)
def test_experts_without_tokens_have_gradients_of_zero(model: str, layout: dict[str, int], dispatch: str) -> None:
    case = Case(model, num_layers=2, global_batch_size=4, dispatch=dispatch, **layout)
    weights = weights_with(case, "bias", torch.tensor(PREFERENCES[model]))
    gradients = gradients_of(compare_with(case, weights, 2), weights)
    of_experts = {name: gradient for name, gradient in gradients.items() if ".experts." in name}
    assert len(of_experts) == 4
    for name, gradient in of_experts.items():
        assert {expert for expert in range(4) if gradient[expert].any()} == CHOSEN[model], name


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="one rank"),
        pytest.param({"tp": 2, "dp": 2, "ep": 4, "sequence_parallel": True}, marks=pytest.mark.distributed, id="ep4"),
        pytest.param({"pp": 2, "cp": 2, "ep": 2}, marks=[pytest.mark.distributed, SLOW], id="pp2 cp2 ep2"),
    ],
)
@pytest.mark.parametrize("model", ["deepseek", pytest.param("moe groups", marks=SLOW)])
def test_of_equal_scores_the_lower_expert_wins(model: str, layout: dict[str, int]) -> None:
    """Routers of zeros give every expert, and every group, the same score, to the bit in any layout. After a step they do not."""
    case = Case(model, global_batch_size=4, **layout)
    weights = weights_with(case, "weight", torch.zeros(()))
    for name, weight in weights.items():
        if name.endswith("router.bias"):
            weight.zero_()
    gradients = gradients_of(compare_with(case, weights, 1), weights)
    top_k = {"deepseek": 3, "moe groups": 2}[model]
    for name, gradient in gradients.items():
        if ".experts." in name:
            assert {expert for expert in range(8) if gradient[expert].any()} == set(range(top_k)), name


# A buffer without room ----------------------------------------------------------------------------------------------------

HEADROOM = 1.25
"""Rows over the balanced number k T: with 2 ranks, all of whose tokens choose the experts of one, it needs 2."""


def too_small(rank: int, case: Case, headroom: float | None) -> tuple[list[str], bool, int]:
    """(errors of a step and of a validation, whether anything changed, updates) with all tokens on the first experts."""
    engine, batches = build_rank(rank, case)
    config: Config = with_value(engine.config, "model.moe.row_headroom", headroom)
    engine = build(resolve_recompute(config, engine.topology.sizes), engine.topology, build_chunks)
    load_weights(engine, weights_with(case, "bias", torch.tensor(PREFERENCES[case.model])))
    microbatches = batches.next_step()
    batches.close()
    before, errors = dict(fingerprint(engine)), []
    for attempt in (
        lambda: engine.update(engine.forward_backward(microbatches), 1e-2).wait(),
        lambda: engine.evaluate([microbatches]),
    ):
        try:
            attempt()
        except DivergenceError as error:
            errors.append(str(error))
    return errors, dict(fingerprint(engine)) == before, engine.optimizer.num_updates


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout", [{"dp": 2, "ep": 2}, pytest.param({"pp": 2, "dp": 2, "ep": 2}, marks=SLOW)], ids=["ep2", "pp2 ep2"]
)
def test_rows_without_room_stop_every_rank_and_lose_nothing(layout: dict[str, int]) -> None:
    case = Case("moe biased", num_layers=2, global_batch_size=2, dispatch="all_gather", **layout)
    # Per layer 2 ranks x 8 tokens x 2 choices, and room for 1.25 x 16.
    lost = 2 * (32 - 20)
    for errors, is_same, num_updates in run_ranks(too_small, case.world_size, case, HEADROOM):
        step, validation = errors
        assert f"{lost} rows of tokens found no room" in step and "model.moe.row_headroom" in step
        assert validation.startswith("Validation: ") and f"{lost} rows of tokens found no room" in validation
        assert is_same and num_updates == 0


def test_a_buffer_with_room_for_the_load_is_enough() -> None:
    case = Case("moe biased", num_layers=2, global_batch_size=2)
    assert too_small(0, case, 1.0) == ([], False, 1)


# A rank without labels ----------------------------------------------------------------------------------------------------


class MaskedEnds:
    """Samples whose first and last quarter are not counted: with cp 2, those are the tokens of the first rank."""

    def __init__(self, samples: SyntheticDataset) -> None:
        self._samples = samples

    def __getitem__(self, sample_id: int) -> Sample:
        sample = self._samples[sample_id]
        quarter = len(sample.loss_mask) // 4
        mask = sample.loss_mask.copy()
        mask[:quarter] = mask[-quarter:] = False
        return sample._replace(loss_mask=mask)

    def lengths(self, sample_id: int) -> tuple[int, ...]:
        return self._samples.lengths(sample_id)


def run_masked(rank: int, case: Case, weights: Weights, num_steps: int) -> RankResult:
    cases.dataset = lambda config: MaskedEnds(dataset(config))  # type: ignore[assignment,return-value]
    return run_case(rank, case, weights, num_steps)


@pytest.mark.distributed
@pytest.mark.parametrize("dispatch", [BOTH[0], pytest.param(BOTH[1], marks=SLOW)])
def test_a_rank_whose_labels_are_all_masked_routes_its_tokens(dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("moe losses", cp=2, ep=2, num_layers=2, global_batch_size=4, dispatch=dispatch)
    weights = weights_of(case.model, case.num_layers)
    weights = {name: weight.detach() for name, weight in weights.items()}
    results: list[RankResult] = run_ranks(run_masked, 2, case, weights, 2)
    assert results[0].loss_sum == 0 and results[1].loss_sum > 0
    monkeypatch.setattr(cases, "dataset", lambda config: MaskedEnds(dataset(config)))
    check(results, run_oracle(replace(case, cp=1, ep=1), weights, 2), weights)


# The grouped GEMM ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("model", ["moe biased", "deepseek"])
def test_the_grouped_gemm_gives_what_the_loop_gives(model: str, dtype: str, tolerance: float) -> None:
    """Also where experts have no tokens, and buffers have unused rows."""
    case = Case(model, num_layers=4, global_batch_size=2, dtype=dtype)
    weights = weights_with(case, "bias", torch.arange(8.0)[-8 if model == "deepseek" else -4 :] * -10)
    runs = [run_case(0, replace(case, experts=kernel), weights, 1) for kernel in ("loop", "grouped")]
    loop, grouped = (gradients_of([each], weights) for each in runs)
    largest = max(float(gradient.norm()) for gradient in loop.values())
    for name, gradient in loop.items():
        assert float((grouped[name] - gradient).norm()) <= tolerance * max(float(gradient.norm()), largest / 100), name
