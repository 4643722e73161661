"""The learning rate: end values, bounds, monotone parts, and that it depends on nothing but its arguments."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.training import OptimizerConfig
from engine.optimizer.lr import learning_rate


def rates(num_steps: int, **fields: Any) -> list[float]:
    optimizer = OptimizerConfig(**fields)
    return [learning_rate(step, optimizer, num_steps) for step in range(num_steps)]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[OptimizerConfig, int]:
    num_steps = draw(st.integers(1, 60))
    lr = draw(st.floats(1e-6, 1.0))
    decay_steps = draw(st.none() | st.integers(1, 60))
    optimizer = OptimizerConfig(
        lr=lr,
        min_lr=lr * draw(st.floats(0, 1)),
        lr_schedule=draw(st.sampled_from(["cosine", "linear", "constant"])),
        warmup_steps=draw(st.integers(0, 30)),
        decay_steps=decay_steps,
    )
    return optimizer, num_steps


@given(schedules())
@settings(max_examples=200, deadline=None)
def test_warm_up_rises_to_the_peak_and_then_the_rate_only_falls_to_min_lr(case: tuple[OptimizerConfig, int]) -> None:
    optimizer, num_steps = case
    warmup = optimizer.warmup_steps
    values = [learning_rate(step, optimizer, num_steps) for step in range(100)]
    tolerance = 1e-12 * optimizer.lr

    assert all(0 < value <= optimizer.lr + tolerance for value in values[:warmup])
    assert all(optimizer.min_lr - tolerance <= value <= optimizer.lr + tolerance for value in values[warmup:])
    assert all(before < after for before, after in pairwise(values[:warmup]))
    assert all(before >= after - tolerance for before, after in pairwise(values[warmup:]))
    if warmup:
        assert values[warmup - 1] == pytest.approx(optimizer.lr)
    decay_steps = optimizer.decay_steps or num_steps
    if optimizer.lr_schedule == "constant":
        assert set(values[warmup:]) == {optimizer.lr}
    else:
        assert set(values[max(warmup, decay_steps) :]) == {optimizer.min_lr}
        if warmup < decay_steps:
            assert values[warmup] == pytest.approx(optimizer.lr)


def test_the_first_step_has_a_rate_and_warm_up_is_linear() -> None:
    assert rates(10, lr=1.0, warmup_steps=4, lr_schedule="constant")[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_without_warm_up_the_first_step_has_the_peak_and_the_last_still_moves() -> None:
    values = rates(10, lr=1.0, min_lr=0.0, warmup_steps=0, lr_schedule="linear")
    assert values == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_cosine_is_half_way_down_in_the_middle_and_flat_at_both_ends() -> None:
    values = rates(101, lr=3.0, min_lr=1.0, decay_steps=100, lr_schedule="cosine")
    assert values[50] == pytest.approx(2.0)
    assert values[25] == pytest.approx(2.0 + math.cos(math.pi / 4))
    assert values[0] == 3.0 and values[100] == 1.0
    assert values[0] - values[1] < 0.1 * (values[50] - values[51])


def test_decay_steps_may_end_before_or_after_the_run() -> None:
    early = rates(10, lr=1.0, min_lr=0.1, decay_steps=5, lr_schedule="linear")
    assert early[5:] == [0.1] * 5 and early[4] > 0.1
    late = rates(10, lr=1.0, min_lr=0.0, decay_steps=20, lr_schedule="linear")
    assert late[-1] == pytest.approx(0.55)


def test_a_longer_run_with_fixed_decay_steps_repeats_the_rates_of_the_shorter_one() -> None:
    fields: dict[str, Any] = {"lr": 1e-3, "warmup_steps": 3, "decay_steps": 30}
    assert rates(40, **fields)[:20] == rates(20, **fields)
