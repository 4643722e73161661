"""Learning rates of Megatron-LM's arguments, there and back, against Megatron-Core's own scheduler, step by step."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.config.bad_configs import config_with
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.optimizer.lr import learning_rate
from triaxis.models.interop.megatron.schedule import export_notes, megatron_rates, schedule_args, schedule_fields

BATCH, LENGTH, STEPS = 16, 32, 100
RUN = {"train_iters": STEPS, "global_batch_size": BATCH, "seq_length": LENGTH, "lr": 1e-3, "min_lr": 1e-5}
SAMPLES = {"train_iters": None, "train_samples": STEPS * BATCH}


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
        (
            {"lr_decay_style": "inverse-square-root", "min_lr": 0.0, "lr_warmup_iters": 5},
            {"lr_schedule": "inverse_sqrt"},
        ),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20, "lr_wsd_decay_style": "minus_sqrt"},
            {
                "lr_schedule": "wsd",
                "cooldown_tokens": 20 * BATCH * LENGTH,
                "cooldown_shape": "sqrt",
                "min_lr": 1e-5,
            },
        ),
    ],
    ids=["cosine", "linear", "constant", "inverse root", "WSD"],
)
def test_arguments_are_fields_and_the_fields_are_legal(args: dict[str, Any], fields: dict[str, Any]) -> None:
    found, _ = schedule_fields(RUN | args)
    assert found.items() >= fields.items()
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
        ({"lr_decay_style": "WSD", "lr_wsd_decay_style": "x"}, "lr_wsd_decay_style = x is not built"),
        ({"train_iters": None}, "do not say the run's length"),
    ],
)
def test_what_has_no_counterpart_is_a_note(args: dict[str, Any], said: str) -> None:
    _, notes = schedule_fields(RUN | args)
    assert len(notes) == 1 and said in notes[0]


@pytest.mark.parametrize("value", ["5", float("nan"), float("inf"), 2**70])
def test_an_argument_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"lr_warmup_iters = .*: must be a number"):
        schedule_fields(RUN | {"lr_warmup_iters": value})


def their_rates(args: dict[str, Any]) -> list[float]:
    """Return the rate of every step; the scheduler is made as by `get_optimizer_param_scheduler` of Megatron-LM 0.16."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    given = {
        name: args.get(name)
        for name in ("lr_decay_samples", "lr_warmup_fraction", "lr_wsd_decay_samples", "lr_wsd_decay_iters")
    }
    if args.get("train_samples"):
        length = given["lr_decay_samples"] or args["train_samples"]
        warmup, fall = args.get("lr_warmup_samples", 0), given["lr_wsd_decay_samples"]
    else:
        length = (args.get("lr_decay_iters") or args["train_iters"]) * BATCH
        warmup, fall = args.get("lr_warmup_iters", 0) * BATCH, (given["lr_wsd_decay_iters"] or 0) * BATCH
    if given["lr_warmup_fraction"] is not None:
        warmup = given["lr_warmup_fraction"] * length
    group: dict[str, Any] = {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),  # type: ignore[arg-type]
        init_lr=args.get("lr_warmup_init", 0.0),
        max_lr=args["lr"],
        min_lr=args["min_lr"],
        lr_warmup_steps=warmup,
        lr_decay_steps=length,
        lr_decay_style=args.get("lr_decay_style", "linear"),
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=1,
        wd_incr_style="constant",
        wsd_decay_steps=fall,
        lr_wsd_decay_style=args.get("lr_wsd_decay_style", "exponential"),
    )
    found = []
    for _ in range(STEPS):
        found.append(group["lr"])
        scheduler.step(BATCH)
    return found


def our_rates(optimizer: OptimizerConfig) -> list[float]:
    tokens = BATCH * LENGTH
    return [learning_rate(step * tokens, tokens, optimizer, STEPS * tokens) for step in range(STEPS)]


def said_is_measured(notes: list[str], theirs: list[float], ours: list[float]) -> int | None:
    """Compare what a note says with rates of every step; return the step from which on they are equal, 1 for all of them."""
    gaps = [abs(one - other) for one, other in zip(theirs, ours, strict=True)]
    differing = [step for step, gap in enumerate(gaps, 1) if gap > 1e-12 * max(theirs)]
    if not differing:
        assert notes == []
        return 1
    (note,) = notes
    number = r"([\d.e-]+)"
    found = re.match(
        rf"the learning rate of step 1 is {number} in Megatron-LM and {number} here; of {STEPS} steps, step (\d+) differs most, by "
        rf"{number}: {number} there, {number} here(?:; the rates are equal from step (\d+) on)?$",
        note,
    )
    assert found, note
    first_there, first_here, largest, gap, there, here, equal = found.groups()
    at = int(largest) - 1
    said = [float(word) for word in (first_there, first_here, gap, there, here)]
    assert said == pytest.approx([theirs[0], ours[0], max(gaps), theirs[at], ours[at]], rel=1e-5)
    assert (int(equal) if equal else None) == (differing[-1] + 1 if differing[-1] < STEPS else None)
    return int(equal) if equal else None


STYLES: dict[str, dict[str, Any]] = {
    "constant": {"lr_decay_style": "constant"},
    "linear": {},
    "cosine": {"lr_decay_style": "cosine"},
    "root": {"lr_decay_style": "inverse-square-root", "min_lr": 0.0},
    **{
        f"WSD {style}": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20, "lr_wsd_decay_style": style}
        for style in ("linear", "cosine", "exponential", "minus_sqrt")
    },
}
WARMUPS: dict[str, tuple[dict[str, Any], int]] = {
    # arguments, and the step from which on the rates are equal
    "none": ({}, 1),
    "iterations": ({"lr_warmup_iters": 5}, 6),
    "fraction": ({"lr_warmup_fraction": 0.07}, 8),
    "part of a step": ({"lr_warmup_fraction": 0.0725}, 9),
    "from 1e-4": ({"lr_warmup_iters": 5, "lr_warmup_init": 1e-4}, 6),
}


@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("style", STYLES)
def test_rates_are_megatrons_behind_the_warm_up_and_the_difference_is_said(style: str, warmup: str) -> None:
    more, equal = WARMUPS[warmup]
    # Without a warm-up, the root begins at one sample there.
    assert compared(STYLES[style] | more) == (None if (style, warmup) == ("root", "none") else equal)


@pytest.mark.parametrize(
    ("args", "equal"),
    [
        ({"lr_decay_iters": 50}, 1),
        ({"lr_decay_iters": 150, "lr_decay_style": "cosine"}, 1),
        ({"lr_decay_iters": 50, "lr_decay_style": "constant"}, 1),
        # A warm-up of 3,737.6 tokens, which are whole ones here.
        ({"lr_warmup_fraction": 0.073}, None),
        # What is not here: a root's floor and its end, and a WSD that falls before the end of the run, or is cut by it.
        ({"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 5, "min_lr": 5e-4}, None),
        ({"lr_decay_style": "inverse-square-root", "lr_warmup_iters": 5, "lr_decay_iters": 50}, None),
        (STYLES["WSD linear"] | {"lr_decay_iters": 50}, None),
        (STYLES["WSD linear"] | {"lr_decay_iters": 110}, None),
        # In samples: whole steps, and parts of them.
        (SAMPLES | {"lr_warmup_samples": 80, "lr_decay_style": "cosine"}, 6),
        (SAMPLES | {"lr_warmup_samples": 83, "lr_decay_style": "cosine"}, 7),
        (SAMPLES | {"lr_decay_samples": 50 * BATCH}, 1),
        (SAMPLES | {"lr_decay_samples": 50 * BATCH + 3}, 52),
        (SAMPLES | {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 21 * BATCH - 5}, 1),
        # A checkpoint knows both.
        (SAMPLES | {"train_iters": STEPS, "lr_decay_samples": 50 * BATCH, "lr_decay_style": "cosine"}, 1),
    ],
)
def test_the_ends_of_schedules_and_their_units(args: dict[str, Any], equal: int | None) -> None:
    assert compared(args) == equal


def compared(args: dict[str, Any]) -> int | None:
    """Compare Megatron's scheduler, our formula of it, and the import; return the step from which on the rates are equal."""
    args = RUN | args
    theirs, rates = their_rates(args), megatron_rates(args)
    assert rates is not None
    assert [rates.rate(step * BATCH) for step in range(STEPS)] == pytest.approx(theirs, rel=1e-12, abs=1e-18)
    fields, notes = schedule_fields(args)
    return said_is_measured(notes, theirs, our_rates(OptimizerConfig(lr=args["lr"], **fields)))


@pytest.mark.parametrize(
    ("fields", "equal"),
    [
        ({"lr_schedule": "constant", "warmup_steps": 5}, 6),
        ({"lr_schedule": "linear", "min_lr": 1e-4}, 1),
        ({"lr_schedule": "cosine", "warmup_steps": 5, "decay_steps": 50}, 6),
        ({"lr_schedule": "cosine", "warmup_tokens": 1234}, None),
        ({"lr_schedule": "inverse_sqrt"}, 2),
        ({"lr_schedule": "inverse_sqrt", "warmup_steps": 5}, 6),
        ({"lr_schedule": "inverse_sqrt", "warmup_steps": 5, "cooldown_tokens": 20 * BATCH * LENGTH}, None),
        *(
            ({"lr_schedule": "wsd", "cooldown_tokens": 20 * BATCH * LENGTH, "cooldown_shape": shape}, 1)
            for shape in ("linear", "cosine", "sqrt", "exponential")
        ),
        ({"lr_schedule": "wsd", "cooldown_tokens": 1234}, None),
    ],
)
def test_an_export_has_the_rates_of_the_run_or_says_the_difference(fields: dict[str, Any], equal: int | None) -> None:
    words = [f"optimizer.{name}={value}" for name, value in fields.items()]
    config = config_with(
        f"train.steps={STEPS}",
        f"train.global_batch_size={BATCH}",
        f"model.seq_length={LENGTH}",
        "optimizer.lr=1e-3",
        *words,
    )
    args = RUN | schedule_args(config)
    notes = export_notes(args, config)
    assert said_is_measured(notes, their_rates(args), our_rates(config.optimizer)) == equal


def test_a_long_run_is_compared_where_its_parts_begin_and_end() -> None:
    args = RUN | {
        "train_iters": 10**12,
        "lr_warmup_iters": 123_457,
        "lr_decay_iters": 10**11,
        "lr_decay_style": "cosine",
    }
    _, (note,) = schedule_fields(args)
    assert "of 1,000,000,000,000 steps, step 1 differs most" in note and note.endswith("equal from step 123,458 on")


def test_an_export_of_a_run_with_phases_says_that_nothing_was_compared() -> None:
    config = config_with("phases=[{name: a, until: 1000}, {name: b, until: 2000, train.global_batch_size: 8}]")
    (note,) = export_notes(RUN | schedule_args(config), config)
    assert "a run with phases were not compared" in note
