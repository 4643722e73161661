"""The validation loss of a layout is the oracle's: without dropout, over every sample of every data-parallel rank, per token."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import run_ranks
from tests.oracle import oracle_loss_sum
from tests.parity.cases import Case, build_rank, dataset, load_weights, weights_of
from tests.planting import Plant, run_planted
from triaxis.engine.step import Engine
from triaxis.models.gpt.chunk import GPTChunk

pytestmark = pytest.mark.distributed

NUM_TRAINED, NUM_EVALUATED = 1, 2
"""Global batches."""

LAYOUTS = [
    Case("gpt_dropout", tp=2, pp=2, dp=2, sequence_parallel=True, num_layers=2),
    Case("gpt_dropout", dp=2, micro_batch_size=2, num_layers=2),
    Case("gpt_dropout", pp=2, vpp=2, num_layers=4),
    Case("gpt_dropout", pp=2, vpp=2, schedule="zbv", num_layers=4),
    Case("kinds", cp=2, pp=2, num_layers=4),
    Case("gpt_dropout", cp=2, dp=2, cp_method="ulysses", num_layers=2),
    Case("moe losses", dp=2, ep=2, dispatch="all_to_all", num_layers=2),
    Case("moe losses", tp=2, ep=2, micro_batch_size=2, num_layers=2),
]


def dropout_stays_on() -> None:
    """Plant a validation in training mode."""
    GPTChunk.train = lambda self, mode=True: nn.Module.train(self, True)  # type: ignore[method-assign]


def every_rank_evaluates_microbatch_0() -> None:
    """Plant data-parallel ranks that all evaluate the first rank's samples."""
    evaluate = Engine.evaluate

    def of_rank_0(self: Engine, steps: Iterable[Sequence[Any]]) -> float:
        return evaluate(self, ([microbatches[0]] * len(microbatches) for microbatches in steps))

    Engine.evaluate = of_rank_0  # type: ignore[method-assign]


def ranks_average_their_own_means() -> None:
    """Plant a loss that is averaged per rank in place of per token."""
    count = Engine._count

    def mean(self: Engine, losses: Sequence[torch.Tensor], microbatches: Sequence[Any]) -> torch.Tensor:
        counts = count(self, losses, microbatches)
        return counts / counts[1].clamp(min=1.0)

    Engine._count = mean  # type: ignore[method-assign]


def validation_loss(rank: int, case: Case) -> float:
    """Train on one global batch without an update, then validate on the next ones."""
    engine, batches = build_rank(rank, case)
    load_weights(engine, {name: weight.detach() for name, weight in weights_of(case.model, case.num_layers).items()})
    for _ in range(NUM_TRAINED):
        engine.forward_backward(batches.next_step())
    loss = engine.evaluate(batches.next_step() for _ in range(NUM_EVALUATED))
    batches.close()
    return loss


@cache
def oracle_validation_loss(model: str, num_layers: int | None) -> float:
    """The mean loss of all counted labels of the evaluated samples, read from the data set one by one."""
    case = Case(model, num_layers=num_layers)
    config = case.config()
    plain = config.model.model_copy(update={"hidden_dropout": 0.0, "attention_dropout": 0.0})
    weights = weights_of(model, num_layers)
    samples = dataset(config)
    loss_sum, num_tokens = 0.0, 0
    first = NUM_TRAINED * case.global_batch_size
    for number in range(first, first + NUM_EVALUATED * case.global_batch_size):
        tokens, loss_mask = (torch.from_numpy(values)[None] for values in samples[number][:2])
        positions = torch.arange(config.model.seq_length)[None]
        with torch.no_grad():
            one = oracle_loss_sum(plain, weights, tokens[:, :-1], tokens[:, 1:], loss_mask, positions, [number])
        loss_sum += float(one)
        num_tokens += int(loss_mask.sum())
    return loss_sum / num_tokens


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_validation_loss_equals_the_oracle(case: Case) -> None:
    expected = oracle_validation_loss(case.model, case.num_layers)
    assert run_ranks(validation_loss, case.world_size, case) == pytest.approx([expected] * case.world_size, rel=1e-12)


@pytest.mark.parametrize(
    "plant",
    [dropout_stays_on, every_rank_evaluates_microbatch_0, ranks_average_their_own_means],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_moves_the_validation_loss(plant: Plant) -> None:
    case = LAYOUTS[1]
    for loss in run_planted(plant, validation_loss, case.world_size, case):
        assert loss != pytest.approx(oracle_validation_loss(case.model, case.num_layers), rel=1e-4)
