"""fp16 with a loss scale: gradients come out times the scale, overflows skip the same steps in all layouts, and torch agrees."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case, build_rank, owned_pieces
from triaxis.engine.config.schema.loss_scale import LossScaleConfig
from triaxis.engine.data.loader import Batches
from triaxis.engine.errors import DivergenceError
from triaxis.engine.optimizer.loss_scale import LossScale
from triaxis.engine.step import Engine

pytestmark = pytest.mark.distributed

LR = 1e-3


def build_scaled(rank: int, case: Case, config: LossScaleConfig) -> tuple[Engine, Batches]:
    engine, batches = build_rank(rank, case)
    engine.loss_scale = LossScale(config, engine.topology.device)
    return engine, batches


# The scale is in every gradient ------------------------------------------------------------------------------------------


def grads_and_masters(rank: int, case: Case, scale: float) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
    engine, batches = build_scaled(rank, case, LossScaleConfig(static=scale))
    losses = engine.forward_backward(batches.next_step())
    grads = [piece.values for piece in owned_pieces(engine, "grads")]
    norm = engine.update(losses, LR).wait().grad_norm
    batches.close()
    return grads, [piece.values for piece in owned_pieces(engine, "master")], norm


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("deepseek", micro_batch_size=4, pp=2), marks=pytest.mark.slow),
        Case("moe losses", micro_batch_size=8, num_layers=2),
        Case("ahead two", micro_batch_size=8),
    ],
    ids=str,
)
def test_every_gradient_has_the_scale_and_no_update_does(case: Case) -> None:
    """In float64 a power of two changes no bits; experts' losses on their load and tokens ahead have gradients of their own."""
    both = [run_ranks(grads_and_masters, case.world_size, case, scale) for scale in (1.0, 2.0**20)]
    for (grads, masters, norm), (scaled, same, same_norm) in zip(*both, strict=True):
        assert all(torch.equal(two, 2.0**20 * one) for one, two in zip(grads, scaled, strict=True))
        assert all(map(torch.equal, masters, same)) and norm == same_norm


# Overflows that are planted ----------------------------------------------------------------------------------------------

PLANTED = {1: (0, torch.inf), 2: (-1, torch.nan), 4: (1, -torch.inf)}
"""By step: the rank that has it, and what one of its gradients is."""

USED = [1024.0, 1024.0, 1024.0, 512.0, 512.0, 256.0, 256.0, 512.0]
"""Megatron-LM's rule with a window of 2 and a hysteresis of 2: the second overflow halves, and so does the third."""

SMALL = Case("llama", num_layers=2, micro_batch_size=2, dtype="fp16")
LAYOUTS = [
    replace(SMALL, tp=2),
    replace(SMALL, pp=2),
    replace(SMALL, dp=2),
    replace(SMALL, cp=2),
    Case("deepseek", dp=2, ep=2, micro_batch_size=4, dtype="fp16"),
    replace(SMALL, tp=2, pp=2, dp=2, sequence_parallel=True),
]
IN_CI = (LAYOUTS[0], LAYOUTS[4])


def planted(rank: int, case: Case) -> tuple[list[float | None], list[int], int]:
    """Scales by step, the steps that updated nothing, and the updates in the moments."""
    engine, batches = build_scaled(rank, case, LossScaleConfig(initial=1024.0, window=2, hysteresis=2))
    used, skipped = [], []
    for step in range(len(USED)):
        losses = engine.forward_backward(batches.next_step())
        where, value = PLANTED.get(step, (None, 0.0))
        if where is not None and engine.topology.rank == where % case.world_size:
            counted = next(owned for owned in engine.optimizer.trained if owned.buffer.is_first)
            counted.grads[0] = value
        before = [piece.values for piece in owned_pieces(engine, "master")]
        result = engine.update(losses, LR).wait()
        after = [piece.values for piece in owned_pieces(engine, "master")]
        assert all(map(torch.equal, before, after)) == (result.skip == "overflowed")
        used.append(result.loss_scale)
        skipped += [step] if result.skip else []
    batches.close()
    return used, skipped, engine.optimizer.num_updates


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in IN_CI else pytest.mark.slow, id=str(case)) for case in LAYOUTS]
)
def test_an_overflow_on_one_rank_is_skipped_by_all(case: Case) -> None:
    expected = (USED, sorted(PLANTED), len(USED) - len(PLANTED))
    assert run_ranks(planted, case.world_size, case) == [expected] * case.world_size


# Overflows that happen ---------------------------------------------------------------------------------------------------

REAL = LossScaleConfig(initial=2.0**32, window=3, hysteresis=1)
NUM_STEPS = 24
Course = tuple[list[tuple[float | None, bool, float]], list[torch.Tensor]]


def course(rank: int, case: Case) -> Course:
    """(scale, whether it overflowed, loss) by step, and the masters at the end."""
    engine, batches = build_scaled(rank, case, REAL)
    results = [engine.train_step(batches.next_step(), LR) for _ in range(NUM_STEPS)]
    batches.close()
    steps = [(result.loss_scale, result.skip == "overflowed", result.loss) for result in results]
    return steps, [owned.state.read("master").clone() for owned in engine.optimizer.trained]


class Scaled(LossScale):
    """The scale of a `GradScaler`, for the backward alone."""

    def follow(self, scaler: torch.amp.GradScaler) -> None:
        self.scale.fill_(scaler.get_scale())


def course_of_torch(rank: int, case: Case) -> Course:
    """The same steps with torch's scaler, clipping and AdamW, on the gradients of the same backward."""
    engine, batches = build_rank(rank, case)
    engine.loss_scale = mine = Scaled(REAL, engine.topology.device)
    scaler = torch.amp.GradScaler("cpu", init_scale=REAL.initial, growth_interval=REAL.window)
    config, owned = engine.config.optimizer, engine.optimizer.trained
    masters = [each.state.read("master").clone() for each in owned]
    runs = [
        (number, where, rule.weight_decay, torch.nn.Parameter(masters[number][where].clone()))
        for number, each in enumerate(owned)
        for where, rule in each.runs(config)
    ]
    optimizer = torch.optim.AdamW(
        [{"params": [weight], "weight_decay": decay} for _, _, decay, weight in runs],
        lr=LR,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    steps: list[tuple[float | None, bool, float]] = []
    for _ in range(NUM_STEPS):
        scaler.scale(torch.zeros(()))
        used = scaler.get_scale()
        mine.follow(scaler)
        losses = engine.forward_backward(batches.next_step())
        for number, where, _, weight in runs:
            weight.grad = owned[number].grads[where].clone()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight for *_, weight in runs], config.clip_grad or torch.inf)
        scaler.step(optimizer)
        scaler.update()
        steps.append((used, scaler.get_scale() < used, float(losses.sums / losses.labels)))
        for number, where, _, weight in runs:
            masters[number][where] = weight.detach()
        for each, master in zip(owned, masters, strict=True):
            each.state.write({"master": master})
    batches.close()
    return steps, masters


def scales_and_skips(steps: Sequence[tuple[float | None, bool, float]]) -> list[tuple[float | None, bool]]:
    return [(scale, has_overflowed) for scale, has_overflowed, _ in steps]


def test_scales_and_skips_are_those_of_torchs_scaler() -> None:
    case = replace(SMALL, micro_batch_size=8)
    [(steps, masters)] = run_ranks(course, 1, case)
    [(expected, of_torch)] = run_ranks(course_of_torch, 1, case)
    assert scales_and_skips(steps) == scales_and_skips(expected)
    skipped = [step for step, (_, has_overflowed, _) in enumerate(steps) if has_overflowed]
    assert skipped != list(range(len(skipped))), "it overflows at the start alone: no doubling went too far"
    for (*_, loss), (*_, their_loss) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(their_loss, abs=2e-3)
    for mine, theirs in zip(masters, of_torch, strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-4, rtol=0)


# What is no overflow -----------------------------------------------------------------------------------------------------


def divergences(rank: int, case: Case) -> list[str]:
    """The words about an overflow at the smallest scale and at a static one, and of a loss that is not finite; scales stay."""
    texts = []
    for config in (LossScaleConfig(initial=4.0, minimum=4.0), LossScaleConfig(static=64.0), LossScaleConfig()):
        engine, batches = build_scaled(rank, case, config)
        losses = engine.forward_backward(batches.next_step())
        engine.optimizer.trained[0].grads[0] = torch.inf
        if config == LossScaleConfig():
            losses.sums[0] = torch.nan
        before = engine.loss_scale.state()
        try:
            engine.update(losses, LR).wait()
        except DivergenceError as error:
            texts.append(str(error))
        assert engine.loss_scale.state() == before and engine.optimizer.num_updates == 0
        batches.close()
    return texts


def test_what_a_smaller_scale_cannot_mend_is_a_divergence() -> None:
    [[at_minimum, static, loss]] = run_ranks(divergences, 1, SMALL)
    assert "at a loss scale of 4, which may not fall further (precision.loss_scale)" in at_minimum
    assert "at a loss scale of 64, which may not fall further" in static
    assert "loss sum nan" in loss and "loss scale" not in loss
