"""What is said of a learning rate that goes on otherwise than it was planned."""

from collections.abc import Callable
from typing import Any

import pytest

from triaxis.engine.checkpoint.schedule_change import schedule_change
from triaxis.engine.config.tree import Config

STEP_TOKENS = 128
COOLDOWN = {"lr_schedule": "wsd", "cooldown_tokens": 10 * STEP_TOKENS}
CONSTANT = {"lr_schedule": "constant"}


@pytest.mark.parametrize(
    ("there", "here", "steps", "said"),
    [
        ({}, {}, 30, []),
        ({"decay_steps": 20}, {"decay_steps": 20}, 60, []),
        (CONSTANT, CONSTANT, 60, []),
        (
            {},
            {},
            60,
            [
                "learning rate: falls from step 0 to 30 (cosine) there, from step 0 to 60 (cosine) here",
                "learning rate of the next step: 0 there, 0.00015 here",
            ],
        ),
        ({}, {"lr": 6e-4}, 30, []),
        (CONSTANT, {**CONSTANT, "lr": 6e-4}, 60, ["learning rate of the next step: 0.0003 there, 0.0006 here"]),
        (
            COOLDOWN,
            COOLDOWN,
            60,
            [
                "learning rate: falls from step 20 to 30 (linear) there, from step 50 to 60 (linear) here",
                "learning rate of the next step: 0 there, 0.0003 here",
            ],
        ),
        (
            CONSTANT,
            COOLDOWN,
            60,
            ["learning rate: falls never there, from step 50 to 60 (linear) here"],
        ),
    ],
)
def test_the_new_shape_and_the_next_rate_are_said(
    make_config: Callable[..., Config], there: dict[str, Any], here: dict[str, Any], steps: int, said: list[str]
) -> None:
    """After 30 of 30 steps."""
    saved = make_config(optimizer=there).model_dump(mode="json")
    config = make_config(optimizer=here, train={"steps": steps, "global_batch_size": 8})
    assert list(schedule_change(saved, config, 30 * STEP_TOKENS)) == said
    assert list(schedule_change({"model": saved["model"]}, config, 30 * STEP_TOKENS)) == [], "an import has no schedule"
