"""bf16 runs add gradients in fp32: microbatches, data-parallel ranks and second sums lose no bits of bf16.

A main grad that is rounded to bf16 at each addition is near the truth, and a loose tolerance accepts it. Here each microbatch's
gradient is taken alone, as the engine itself computes it, and all of them are added in float64. What is left is fp32's rounding.
"""

from dataclasses import replace

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case, build_rank, load_weights, owned_pieces, weights_of
from tests.planting import Plant, run_planted
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.optimizer.bucket import Bucket
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

pytestmark = pytest.mark.distributed

NUM_STEPS = 16
"""Microbatches of each data-parallel rank."""

NUM_LABELS = 64
"""By which every backward divides, whatever its batch counts: the same for all microbatches, and a power of two changes no bits."""

TOLERANCE = 1e-6
"""Of the summed norms of what is added. 17 sums in fp32 round by 17 x 2^-24 = 1e-6 at most; one in bf16 by up to 2^-9 = 2e-3."""

CLEAN = Case("qwen", tp=2, dp=2, sequence_parallel=True, dtype="bf16", num_layers=2, global_batch_size=2 * NUM_STEPS)
PLANTED = Case("gpt", dp=2, dtype="bf16", num_layers=2, global_batch_size=2 * NUM_STEPS)


def main_grads_are_rounded_to_bf16() -> None:
    """Plant a cast of the main grad after each addition."""
    added = Bucket.grad_added

    def rounded(self: Bucket, parameter: ShardedParameter) -> None:
        main_grad = parameter.bound_main_grad()
        main_grad.copy_(main_grad.bfloat16())
        added(self, parameter)

    Bucket.grad_added = rounded  # type: ignore[method-assign]


def gradients_are_reduced_in_bf16() -> None:
    """Plant a reduce-scatter of bf16 values."""
    reduce_scatter = Axis.reduce_scatter

    def narrow(self: Axis, full: torch.Tensor, purpose: str, out: torch.Tensor | None = None) -> Pending:
        full.copy_(full.bfloat16())
        return reduce_scatter(self, full, purpose, out)

    Axis.reduce_scatter = narrow  # type: ignore[method-assign]


def errors(rank: int, case: Case) -> dict[str, float]:
    """Run one step of all microbatches, then a step of each; return the relative error of every owned gradient by name."""
    together = owned_gradients(rank, case, num_steps=1)
    alone = owned_gradients(rank, replace(case, global_batch_size=case.dp * case.micro_batch_size), num_steps=NUM_STEPS)
    found: dict[str, float] = {}
    for number, (name, got) in enumerate(together[0]):
        parts = [step[number][1] for step in alone]
        error = float((got - torch.stack(parts).sum(0)).norm() / sum(part.norm() for part in parts))
        found[name] = max(error, found.get(name, 0.0))
    return found


def owned_gradients(rank: int, case: Case, num_steps: int) -> list[list[tuple[str, torch.Tensor]]]:
    """Return the names and gradients (float64) that this rank owns, step by step; weights are never updated."""
    engine, batches = build_rank(rank, case)
    load_weights(engine, {name: weight.detach() for name, weight in weights_of(case.model, case.num_layers).items()})
    steps = []
    for _ in range(num_steps):
        engine.forward_backward(batches.next_step(), labels=engine.post_labels([NUM_LABELS]))
        steps.append([(piece.name, piece.values.double()) for piece in owned_pieces(engine, "grads")])
    batches.close()
    return steps


def test_bf16_gradients_are_added_in_fp32() -> None:
    for found in run_ranks(errors, CLEAN.world_size, CLEAN):
        assert max(found.values()) <= TOLERANCE, max(found.items(), key=lambda item: item[1])


@pytest.mark.parametrize(
    "plant",
    [main_grads_are_rounded_to_bf16, gradients_are_reduced_in_bf16],
    ids=lambda plant: plant.__name__,
)
def test_one_rounding_to_bf16_is_seen_in_every_tensor(plant: Plant) -> None:
    for found in run_planted(plant, errors, PLANTED.world_size, PLANTED):
        assert min(found.values()) > 10 * TOLERANCE, min(found.items(), key=lambda item: item[1])
