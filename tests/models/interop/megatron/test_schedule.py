"""Learning rates of Megatron-LM's arguments, there and back."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.config.bad_configs import config_with
from triaxis.engine.config.training import OptimizerConfig
from triaxis.engine.optimizer.lr import learning_rate
from triaxis.models.interop.megatron.schedule import schedule_args, schedule_fields

RUN = {"train_iters": 100, "global_batch_size": 16, "seq_length": 32, "min_lr": 1e-5}
STEP_TOKENS = 16 * 32


@pytest.mark.parametrize(
    ("args", "fields"),
    [
        (
            {"lr_decay_style": "cosine", "lr_warmup_iters": 5},
            {"lr_schedule": "cosine", "decay_steps": 100, "min_lr": 1e-5},
        ),
        (
            {"lr_decay_iters": 80, "lr_warmup_fraction": 0.1},
            {"lr_schedule": "linear", "decay_steps": 80, "warmup_steps": 8},
        ),
        ({"lr_decay_style": "constant"}, {"lr_schedule": "constant", "warmup_steps": 0}),
        ({"lr_decay_style": "inverse-square-root", "min_lr": 0.0}, {"lr_schedule": "inverse_sqrt"}),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20, "lr_wsd_decay_style": "minus_sqrt"},
            {"lr_schedule": "wsd", "cooldown_tokens": 20 * STEP_TOKENS, "cooldown_shape": "sqrt", "min_lr": 1e-5},
        ),
    ],
    ids=["cosine", "linear", "constant", "inverse root", "WSD"],
)
def test_arguments_are_fields_and_the_fields_are_legal(args: dict[str, Any], fields: dict[str, Any]) -> None:
    found, notes = schedule_fields(RUN | args)
    assert found.items() >= fields.items() and not notes
    config = config_with("train.steps=100", f"optimizer={found}".replace("'", '"'))
    there = {name: value for name, value in schedule_args(config).items() if name in args}
    assert there == {name: value for name, value in args.items() if name in there}
    again, _ = schedule_fields(RUN | schedule_args(config))
    assert again == found


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"lr_decay_style": "polynomial"}, "lr_decay_style = polynomial is not built"),
        ({"lr_decay_style": "WSD"}, "set optimizer.cooldown_tokens"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9}, "lr_wsd_decay_style = exponential is not built"),
        ({"lr_decay_style": "inverse-square-root"}, "min_lr = 1e-05 is a floor"),
        ({"train_iters": None}, "count samples"),
    ],
)
def test_what_has_no_counterpart_is_a_note(args: dict[str, Any], said: str) -> None:
    _, notes = schedule_fields(RUN | args)
    assert len(notes) == 1 and said in notes[0]


@pytest.mark.parametrize("style", ["cosine", "linear", "constant", "inverse-square-root", "WSD"])
def test_rates_are_megatrons(style: str) -> None:
    """Their scheduler counts samples, and has a step's rate once its samples are counted; ours is that of the step after."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group = {"wd_mult": 1.0, "lr_mult": 1.0, "lr": 0.0, "weight_decay": 0.0}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=0.0,
        lr_warmup_steps=5 * 16,
        lr_decay_steps=100 * 16,
        lr_decay_style=style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=20 * 16,
        lr_wsd_decay_style="minus_sqrt",
    )
    args = {"lr_decay_style": style, "lr_warmup_iters": 5, "lr_wsd_decay_iters": 20, "lr_wsd_decay_style": "minus_sqrt"}
    fields, _ = schedule_fields(RUN | args | {"min_lr": 0.0})
    optimizer = OptimizerConfig(lr=1e-3, **fields)
    for step in range(5, 101):
        scheduler.num_steps = step * 16
        theirs = scheduler.get_lr(group)
        assert learning_rate(step * STEP_TOKENS, STEP_TOKENS, optimizer, 100 * STEP_TOKENS) == pytest.approx(
            theirs, abs=1e-12
        )
