"""The rule of the loss scale, against torch's GradScaler and Megatron's constants, over planted overflows."""

import random
from collections.abc import Sequence

import pytest
import torch

from triaxis.engine.config.schema.loss_scale import LossScaleConfig
from triaxis.engine.optimizer.loss_scale import LossScale, ScaleState

CPU = torch.device("cpu")
GOOD, OVERFLOW, DIVERGED = "good", "overflow", "diverged"


def scales(scale: LossScale, steps: Sequence[str]) -> list[float]:
    """The scale of each step and of the one after the last."""
    found = [float(scale.scale)]
    for step in steps:
        scale.update(torch.tensor(step == OVERFLOW), torch.tensor(step == DIVERGED))
        found.append(float(scale.scale))
    return found


def scales_of_torch(config: LossScaleConfig, steps: Sequence[str]) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=config.initial, growth_interval=config.window)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    found = [scaler.get_scale()]
    for step in steps:
        weight.grad = scaler.scale(torch.tensor([torch.inf if step == OVERFLOW else 1.0]))
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


@pytest.mark.parametrize("window", [1, 3, 7])
def test_with_hysteresis_1_it_is_torchs(window: int) -> None:
    config = LossScaleConfig(initial=2.0**16, window=window, hysteresis=1, minimum=2.0**-24)
    draw = random.Random(window)
    steps = [OVERFLOW if draw.random() < 0.3 else GOOD for _ in range(60)]
    found = scales(LossScale(config, CPU), steps)
    assert found == scales_of_torch(config, steps)
    assert len(set(found)) > 5


def test_overflows_spend_the_hysteresis_and_a_doubling_restores_it() -> None:
    scale = LossScale(LossScaleConfig(initial=1024, window=3, hysteresis=3), CPU)
    #        two are forgiven, the third halves, and every one after it
    steps = [OVERFLOW, GOOD, OVERFLOW, OVERFLOW, GOOD, OVERFLOW, GOOD, GOOD, GOOD, OVERFLOW, OVERFLOW, OVERFLOW]
    expected = [1024, 1024, 1024, 1024, 512, 512, 256, 256, 256, 512, 512, 512, 256]
    assert scales(scale, steps) == expected


def test_a_step_that_diverged_changes_nothing() -> None:
    scale = LossScale(LossScaleConfig(initial=8, window=2, hysteresis=1), CPU)
    assert scales(scale, [GOOD, DIVERGED, DIVERGED, GOOD]) == [8, 8, 8, 8, 16]


def test_it_stops_at_its_minimum() -> None:
    scale = LossScale(LossScaleConfig(initial=6, window=9, hysteresis=1, minimum=2), CPU)
    assert bool(scale.can_fall())
    assert scales(scale, [OVERFLOW, OVERFLOW, OVERFLOW]) == [6, 3, 2, 2]
    assert not bool(scale.can_fall())


@pytest.mark.parametrize("config", [None, LossScaleConfig(static=128)])
def test_a_static_scale_never_moves(config: LossScaleConfig | None) -> None:
    scale = LossScale(config, CPU)
    assert set(scales(scale, [GOOD] * 2000)) == {1.0 if config is None else 128.0}
    assert not bool(scale.can_fall()) and scale.state() is None
    scale.restore(ScaleState(4.0, 3, 2))
    assert float(scale.scale) == (1.0 if config is None else 128.0)


def test_its_state_continues_it() -> None:
    config = LossScaleConfig(initial=1024, window=4, hysteresis=2)
    steps = [OVERFLOW, GOOD, GOOD, GOOD, OVERFLOW, GOOD, GOOD, GOOD, GOOD, OVERFLOW, OVERFLOW]
    for cut in range(len(steps)):
        straight, first, second = (LossScale(config, CPU) for _ in range(3))
        scales(first, steps[:cut])
        scales(second, [OVERFLOW, OVERFLOW, GOOD])
        second.restore(first.state())
        assert scales(second, steps[cut:]) == scales(straight, steps)[cut:]
    second.restore(None)
    assert second.state() == ScaleState(1024.0, 0, 2)


def test_a_state_is_kept_within_the_bounds_of_another_configuration() -> None:
    scale = LossScale(LossScaleConfig(window=10, hysteresis=1, minimum=64), CPU)
    scale.restore(ScaleState(16.0, 500, 2))
    assert scale.state() == ScaleState(64.0, 9, 1)
