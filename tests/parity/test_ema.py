"""The moving average of the masters: one plain loop has the same, in covering layouts and in every dtype.

Two loops are written here. One follows the oracle's weights in one process, and the layout may differ by rounding. The other
follows the layout's own masters, and the layout must have its bits: so layouts with equal masters have equal averages.
"""

from collections.abc import Mapping, Sequence

import pytest
import torch

from tests.harness import compiler, run_ranks
from tests.parity.cases import (
    Case,
    Piece,
    assemble,
    build_rank,
    is_trained,
    load_weights,
    owned_pieces,
    run_oracle,
    weights_of,
)
from triaxis.engine.config.schema.loss_scale import LossScaleConfig
from triaxis.engine.optimizer.loss_scale import LossScale
from triaxis.models.specs import model_specs

STEPS = 5
DECAY = 0.8
SKIPPED = 2
"""The step in which a planted gradient is not finite, where one is planted."""

Snapshot = tuple[list[Piece], list[Piece]]
"""Masters and averages."""


def snapshots(
    rank: int, case: Case, weights: Mapping[str, torch.Tensor] | None, num_steps: int, skipped: int | None = None
) -> list[Snapshot]:
    """Masters and averages of one rank: at the start, then after each step; the gradients of step `skipped` are not finite."""
    engine, batches = build_rank(rank, case)
    if case.dtype == "fp16":
        engine.loss_scale = LossScale(LossScaleConfig(initial=1024.0), engine.topology.device)
    if weights is not None:
        load_weights(engine, {name: weight.detach() for name, weight in weights.items()})
    found = [(owned_pieces(engine, "master"), owned_pieces(engine, "ema"))]
    for step in range(num_steps):
        losses = engine.forward_backward(batches.next_step())
        if step == skipped and rank == 0:
            next(owned for owned in engine.optimizer.trained if owned.buffer.is_first).grads[0] = torch.inf
        result = engine.update(losses, lr=1e-2 / (step + 1)).wait()
        assert (result.skip == "overflowed") == (step == skipped)
        found.append((owned_pieces(engine, "master"), owned_pieces(engine, "ema")))
    batches.close()
    return found


def whole(
    case: Case, ranks: Sequence[Sequence[Snapshot]], tolerance: float
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Whole masters and averages of the trained parameters, by snapshot."""
    shapes = {spec.name: spec.shape for spec in model_specs(case.config().model)}
    trained = {name: shape for name, shape in shapes.items() if is_trained(name)}
    found = []
    for by_rank in zip(*ranks, strict=True):
        masters = assemble(shapes, [piece for masters, _ in by_rank for piece in masters], tolerance)
        averages = assemble(trained, [piece for _, averages in by_rank for piece in averages], tolerance)
        found.append(({name: masters[name] for name in trained}, averages))
    return found


def same_bits(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def check_bits(case: Case, ranks: Sequence[Sequence[Snapshot]], tolerance: float, skipped: int | None = None) -> None:
    """A plain loop over the layout's own masters has the bits of its averages."""
    found = whole(case, ranks, tolerance)
    masters, average = found[0]
    assert same_bits(average, masters), "the average starts as the masters"
    for step, (masters, averages) in enumerate(found[1:]):
        if step == skipped:
            assert same_bits(averages, average) and same_bits(masters, found[step][0])
        else:
            average = {name: mean + (masters[name] - mean) * (1 - DECAY) for name, mean in average.items()}
            assert same_bits(averages, average), f"step {step}"
            assert not same_bits(averages, masters)


def check_oracle(case: Case) -> None:
    weights = weights_of(case.model, case.num_layers)
    expected = {name: weight.detach().clone() for name, weight in weights.items() if is_trained(name)}

    def follow(weights: Mapping[str, torch.Tensor]) -> None:
        for name, mean in expected.items():
            expected[name] = DECAY * mean + (1 - DECAY) * weights[name]

    final = run_oracle(case, weights, STEPS, follow).weights
    ranks = run_ranks(snapshots, case.world_size, case, weights, STEPS)
    check_bits(case, ranks, 1e-12)
    _, averages = whole(case, ranks, 1e-12)[-1]
    for name, mean in expected.items():
        error = float((averages[name] - mean).norm())
        moved = float((final[name] - mean).norm())
        assert error <= 1e-9 * moved, f"{name}: {error} of {moved}"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        Case("deepseek", pp=2, dp=2, ep=2, groups=True, ema=DECAY, global_batch_size=4),
        pytest.param(
            Case("gpt", tp=2, pp=2, dp=2, num_layers=4, groups=True, ema=DECAY, bucket_bytes=300),
            marks=pytest.mark.slow,
        ),
        pytest.param(Case("deepseek", dp=4, ep=2, tp=2, groups=True, ema=DECAY), marks=pytest.mark.slow),
        pytest.param(Case("llama", pp=2, vpp=2, dp=2, num_layers=4, ema=DECAY, schedule="zbv"), marks=pytest.mark.slow),
        pytest.param(
            Case("qwen", tp=4, dp=2, sequence_parallel=True, ema=DECAY, optimizer="sgd"), marks=pytest.mark.slow
        ),
        pytest.param(Case("llama", cp=2, dp=2, num_layers=3, groups=True, ema=DECAY), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_covering_layouts_equal_one_plain_loop(case: Case) -> None:
    check_oracle(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", num_layers=2, dtype="fp16", ema=DECAY, micro_batch_size=4),
        pytest.param(Case("llama", num_layers=2, dtype="bf16", ema=DECAY, micro_batch_size=4), marks=pytest.mark.slow),
        Case("llama", num_layers=2, dtype="bf16", narrow=True, ema=DECAY, micro_batch_size=4),
        pytest.param(Case("llama", num_layers=2, dtype="fp32", ema=DECAY), marks=pytest.mark.slow),
        pytest.param(Case("deepseek", dtype="bf16", ema=DECAY, micro_batch_size=4), marks=pytest.mark.slow),
        pytest.param(
            Case("llama", num_layers=2, dtype="fp16", compiled=True, ema=DECAY, bucket_bytes=300),
            marks=(pytest.mark.slow, compiler()),
        ),
    ],
    ids=str,
)
def test_the_average_has_the_accumulation_dtype_and_skips_what_masters_skip(case: Case) -> None:
    skipped = SKIPPED if case.dtype == "fp16" else None
    found = snapshots(0, case, None, STEPS, skipped)
    check_bits(case, [found], 0.0, skipped)
    assert {piece.values.dtype for piece in found[-1][1]} == {torch.float32}
