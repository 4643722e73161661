"""The learning rate: end values, bounds, monotone parts, and that it depends on nothing but its arguments."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.optimizer.lr import learning_rate

STEP_TOKENS = 96


def rate(step: int, optimizer: OptimizerConfig, num_steps: int) -> float:
    return learning_rate(step * STEP_TOKENS, STEP_TOKENS, optimizer, num_steps * STEP_TOKENS)


def rates(num_steps: int, **fields: Any) -> list[float]:
    optimizer = OptimizerConfig(**fields)
    return [rate(step, optimizer, num_steps) for step in range(num_steps)]


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
    values = [rate(step, optimizer, num_steps) for step in range(100)]
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


def test_tokens_of_a_warm_up_need_not_fill_steps() -> None:
    in_tokens = rates(8, lr=1.0, warmup_tokens=250, lr_schedule="constant")
    assert in_tokens[:4] == [96 / 250, 192 / 250, 1.0, 1.0]
    assert rates(8, lr=0.3, warmup_tokens=4 * STEP_TOKENS) == rates(8, lr=0.3, warmup_steps=4)


def test_rates_belong_to_tokens_whatever_a_step_has() -> None:
    fields: dict[str, Any] = {"lr": 1.0, "min_lr": 0.1, "warmup_tokens": 384}
    for schedule in ({"lr_schedule": "wsd", "cooldown_tokens": 768}, {"lr_schedule": "inverse_sqrt"}, {}):
        optimizer = OptimizerConfig(**fields | schedule | ({"min_lr": 0.0} if schedule else {}))
        for consumed in range(384, 3000, 96):
            assert learning_rate(consumed, 96, optimizer, 1920) == learning_rate(consumed, 24, optimizer, 1920)


@pytest.mark.parametrize(
    ("shape", "half_way"),
    [("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("exponential", math.sqrt(2) - 1)],
)
def test_wsd_is_constant_and_falls_in_its_last_tokens(shape: str, half_way: float) -> None:
    """2405.18392: 1 - sqrt is below a line from the first step on."""
    fields = {"lr": 2.0, "min_lr": 1.0, "warmup_steps": 5, "cooldown_tokens": 20 * STEP_TOKENS, "cooldown_shape": shape}
    values = rates(100, lr_schedule="wsd", **fields)
    assert values[4:81] == [2.0] * 77 and values[81] < 2.0
    assert values[90] == pytest.approx(1.0 + half_way)
    assert 1.0 < values[99] < values[98]
    assert rate(100, OptimizerConfig(lr_schedule="wsd", **fields), 100) == 1.0


def test_two_ends_of_one_stable_part_share_its_rates() -> None:
    """A run that is to go on has the rates of a longer one, up to the fall."""
    fields: dict[str, Any] = {"lr": 1.0, "lr_schedule": "wsd", "warmup_steps": 3, "cooldown_tokens": 10 * STEP_TOKENS}
    assert rates(40, **fields)[:31] == rates(80, **fields)[:31]


def test_an_inverse_root_starts_where_the_warm_up_ends_and_may_fall_at_the_end() -> None:
    values = rates(100, lr=1.0, lr_schedule="inverse_sqrt", warmup_steps=4)
    assert values[3] == values[4] == 1.0
    assert values[16] == 0.5 and values[64] == 0.25
    assert rates(20, lr=1.0, lr_schedule="inverse_sqrt")[:3] == pytest.approx([1.0, 1.0, math.sqrt(0.5)])
    fallen = rates(100, lr=1.0, lr_schedule="inverse_sqrt", warmup_steps=4, cooldown_tokens=36 * STEP_TOKENS)
    assert fallen[:65] == values[:65] and fallen[82] == pytest.approx(0.125)
