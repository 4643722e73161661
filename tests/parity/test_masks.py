"""Losses of which 5 % of the labels count: each part is over a divisor of its own, and a batch without labels changes nothing."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.harness import run_ranks
from tests.parity import cases
from tests.parity.cases import Case, RankResult, build_rank, dataset, owned_pieces, run_case, run_oracle, weights_of
from tests.parity.test_parity import check
from triaxis.engine.config.tree import Config
from triaxis.engine.data.samples import Sample, SampleSource

STEPS = 1
BATCH = 8


class Answers:
    """Samples of which few labels count: the last ones of every eighth, as of a short answer behind a long text.

    Of a batch of 8 these are 3 of 64 labels (5 %); of the tokens one further on 2 count, and of those behind them 1. Most ranks and
    microbatches have none.

    Args:
        empty: batches of which nothing counts.
    """

    def __init__(self, samples: SampleSource, empty: tuple[int, ...] = ()) -> None:
        self._samples, self._empty = samples, empty

    def __getitem__(self, sample_id: int) -> Sample:
        sample = self._samples[sample_id]
        batch, place = divmod(sample_id, BATCH)
        mask = np.zeros_like(sample.loss_mask)
        if place == 5 and batch not in self._empty:
            mask[-3:] = True
        return sample._replace(loss_mask=mask)

    def lengths(self, sample_id: int) -> tuple[int, ...]:
        return self._samples.lengths(sample_id)


def answers(config: Config) -> Answers:
    return Answers(dataset(config))


def run_answers(rank: int, case: Case, weights: Mapping[str, torch.Tensor], num_steps: int) -> RankResult:
    cases.dataset = answers  # type: ignore[assignment]
    return run_case(rank, case, weights, num_steps)


def compare(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold a layout, and its losses of tokens ahead, to the oracle's formula (`tests.parity.cases.trained_loss`)."""
    weights = {name: weight.detach() for name, weight in weights_of(case.model, case.num_layers).items()}
    results: list[RankResult] = (
        run_ranks(run_answers, case.world_size, case, weights, STEPS) if case.world_size > 1 else []
    )
    monkeypatch.setattr(cases, "dataset", answers)
    results = results or [run_case(0, case, weights, STEPS)]
    assert {result.num_tokens for result in results} == {3}
    expected = run_oracle(Case(case.model, num_layers=case.num_layers, documents=case.documents), weights, STEPS)
    check(results, expected, weights)
    for result in results:
        assert result.ahead == pytest.approx(expected.ahead, rel=1e-12)


def test_each_part_of_the_loss_has_a_divisor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts with both losses on their load, and two tokens ahead."""
    compare(Case("ahead deepseek", num_layers=2, micro_batch_size=2), monkeypatch)


COVERING = [
    Case("ahead deepseek", tp=2, pp=2, sequence_parallel=True, num_layers=2),
    Case("ahead deepseek", dp=2, cp=2, ep=2, num_layers=2, micro_batch_size=2),
    Case("ahead deepseek", pp=2, vpp=2, dp=2, schedule="zbv", num_layers=4),
    Case("ahead two", tp=2, cp=2, documents=True, recompute=("full", "uniform", 1)),
    Case("moe losses", tp=2, dp=2, ep=4, num_layers=2),
]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering_layouts_have_the_same_divisors(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(case, monkeypatch)


# A batch without labels ---------------------------------------------------------------------------------------------------

State = list[torch.Tensor]


def states(rank: int, case: Case, empty: tuple[int, ...], num_steps: int) -> tuple[list[State], list[float], int]:
    """(The whole state of a rank after each step, losses, updates in the moments) of a run with empty batches."""
    cases.dataset = lambda config: Answers(dataset(config), empty)  # type: ignore[assignment,return-value]
    engine, batches = build_rank(rank, case)
    found, losses = [], []
    for _ in range(num_steps):
        result = engine.train_step(batches.next_step(), 1e-2)
        engine.buffers.wait_all()
        kinds = [piece.values for kind in engine.optimizer.state_kinds for piece in owned_pieces(engine, kind)]
        weights = [parameter.value.detach().clone() for parameter in engine.parameters.values()]
        found.append([*kinds, *weights])
        losses.append(result.loss)
        assert bool(result.num_tokens) == (len(found) - 1 not in empty) == (not result.skip)
    batches.close()
    return found, losses, engine.optimizer.num_updates


def check_skips(results: list[tuple[list[State], list[float], int]]) -> None:
    for found, losses, num_updates in results:
        first, second, third = found
        assert all(map(torch.equal, first, second)), "a step without labels has changed something"
        assert not all(map(torch.equal, second, third))
        assert losses[0] > 0 and losses[1] == 0 and losses[2] > 0 and num_updates == 2


SKIPPING = Case("ahead deepseek", num_layers=2, micro_batch_size=4, ema=0.9)


def test_a_batch_without_labels_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters, moments, average, biases of routers, weights: though the losses on the load have gradients."""
    monkeypatch.setattr(cases, "dataset", dataset)  # What `states` puts in its place goes with the test.
    check_skips([states(0, SKIPPING, (1,), 3)])


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [replace(SKIPPING, pp=2, dp=2, ep=2), replace(SKIPPING, tp=2, cp=2, dtype="bf16", narrow=True)],
    ids=str,
)
def test_every_layout_skips_a_batch_without_labels(case: Case) -> None:
    check_skips(run_ranks(states, case.world_size, case, (1,), 3))
