"""Phases of a run: what reading makes of them, where each begins and ends, and phases that are refused."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.config.bad_configs import LEGAL
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import batch_plan, planned_steps, planned_tokens
from triaxis.engine.config.quantities.run_phases import (
    as_a_run,
    at_phase,
    current_phase,
    data_segments,
    past_differs,
    phase_at,
    run_phases,
)
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import to_yaml
from triaxis.engine.errors import ConfigError

PHASED = ["train.steps=null", "checkpoint.interval=5"]
LONGER = "{name: longer, until: 9k, model.seq_length: 128, train.global_batch_size: 4, parallel.tp: 2}"


def phased(phases: str, *more: str) -> Config:
    return load_config(None, [*_without_steps(), *PHASED[1:], *more, f"phases={phases}"])


def _without_steps() -> list[str]:
    return [word.replace("steps: 10, ", "") for word in LEGAL]


def test_each_phase_has_every_field_that_one_of_them_has() -> None:
    config = phased(f"[{{name: main, until: 5000}}, {LONGER}]")
    main, longer = config.phases
    assert main == {
        "name": "main",
        "until": 5000,
        "model.seq_length": 32,
        "train.global_batch_size": 16,
        "parallel.tp": 1,
    }
    assert longer["model.seq_length"] == 128
    assert (config.train.phase, config.model.seq_length, config.parallel.tp) == ("main", 32, 1)
    there = at_phase(config, "longer")
    assert (there.train.phase, there.model.seq_length, there.parallel.tp) == ("longer", 128, 2)
    assert there.phases == config.phases
    assert at_phase(there, "main") == config


@pytest.mark.parametrize("name", ["main", "longer"])
@pytest.mark.parametrize("describe", [False, True])
def test_what_is_written_is_read_back(name: str, describe: bool, tmp_path: Path) -> None:
    config = at_phase(phased(f"[{{name: main, until: 5000}}, {LONGER}]"), name)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config, describe=describe))
    assert load_config(path) == config


def test_a_phase_is_whole_steps_and_counts_go_on() -> None:
    config = phased(f"[{{name: main, until: 5000}}, {LONGER}]")
    main, longer = run_phases(config)
    assert (main.first_step, main.end_step, main.end_token) == (0, 10, 5120)
    assert (longer.first_step, longer.first_sample, longer.first_token) == (10, 160, 5120)
    assert (longer.tokens_per_step, longer.end_step, longer.end_token) == (512, 18, 9216)
    assert (longer.samples_before(12), longer.tokens_before(12), longer.step_after(168)) == (168, 6144, 12)
    assert (planned_steps(config), planned_tokens(config)) == (18, 9216)
    plan = batch_plan(at_phase(config, "longer"), 1)
    assert (plan.num_steps, plan.num_tokens, plan.phase, plan.num_microbatches) == (18, 9216, longer, 2)


def test_the_edge_belongs_to_the_next_phase() -> None:
    config = phased(f"[{{name: main, until: 5000}}, {LONGER}]")
    names = [phase_at(config, tokens).name for tokens in (0, 5119, 5120, 9215, 9216)]
    assert names == ["main", "main", "longer", "longer", "longer"]


def test_a_run_without_phases_is_one_phase() -> None:
    config = load_config(None, LEGAL)
    [phase] = run_phases(config)
    assert phase == current_phase(config) == batch_plan(config, 1).phase
    assert (phase.name, phase.first_step, phase.end_step, phase.end_token) == ("", 0, 10, 5120)
    [segment] = data_segments(config)
    assert (segment.train, segment.seq_length, segment.first_position) == (((1.0, "corpus"),), 32, 0)


PHASE = st.tuples(st.integers(1, 3000), st.sampled_from([8, 16, 32]), st.sampled_from([16, 32, 64]))


@settings(max_examples=60, deadline=None)
@given(st.lists(PHASE, min_size=1, max_size=5))
def test_random_phases_have_no_gap(drawn: list[tuple[int, int, int]]) -> None:
    entries: list[dict[str, Any]] = []
    until = 0
    for number, (tokens, batch, length) in enumerate(drawn):
        until += tokens + 32 * 64
        fields = {"train.global_batch_size": batch, "model.seq_length": length}
        entries.append({"name": f"s{number}", "until": until, **fields})
    tree = load_config(None, [*_without_steps(), "train.steps=1"]).model_dump(mode="json")
    tree["train"]["steps"] = None
    config = Config.model_validate({**tree, "phases": entries})
    phases = run_phases(config)
    for entry, phase in zip(entries, phases, strict=True):
        assert entry["until"] <= phase.end_token < entry["until"] + phase.tokens_per_step
        assert phase.end_step > phase.first_step
    for before, after in pairwise(phases):
        assert after.first_step == before.end_step
        assert after.first_sample == before.samples_before(before.end_step)
        assert after.first_token == before.end_token
    for phase in phases:
        for step in (phase.first_step, phase.end_step - 1):
            assert phase.step_after(phase.samples_before(step)) == step
            assert phase_at(config, phase.tokens_before(step)) == phase


def test_an_edge_without_another_cut_is_none_for_the_data() -> None:
    config = phased(
        "[{name: a, until: 5k}, {name: b, until: 9k, parallel.tp: 2}, {name: c, until: 15k, train.global_batch_size: 32}, "
        "{name: d, until: 20k, data.train: other}]"
    )
    assert len(data_segments(at_phase(config, "c"))) == 1
    one, two = data_segments(at_phase(config, "d"))
    assert (one.first_position, two.first_position) == (0, run_phases(config)[3].first_sample)
    assert two.train == ((1.0, "other"),)


def test_what_lies_ahead_may_change_and_what_was_read_may_not() -> None:
    was = load_config(None, LEGAL)
    branch = phased("[{name: main, until: 2560}, {name: decay, until: 9k, data.train: other}]")
    assert past_differs(was, branch, 2560) is None
    assert past_differs(branch, was, 2560) is None
    beyond = past_differs(was, branch, 3072)
    assert beyond is not None and "other" in beyond
    assert (
        past_differs(was, phased("[{name: main, until: 9k, model.seq_length: 64}, {name: rest, until: 20k}]"), 512)
        is not None
    )
    assert (
        past_differs(
            was, phased("[{name: main, until: 9k, train.global_batch_size: 32}, {name: rest, until: 20k}]"), 1024
        )
        is not None
    )
    assert past_differs(was, phased("[{name: main, until: 9k, parallel.tp: 2}, {name: rest, until: 20k}]"), 512) is None


BAD = {
    "phases and a length": (
        ["train.steps=10", "phases=[{name: all, until: 5120}]"],
        ["train.steps = 10", "the last one ends the run", "train.steps = null"],
    ),
    "a phase without a step": (
        ["phases=[{name: main, until: 5000}, {name: more, until: 5100}]"],
        ["phases.1.until = 5100", "must be more than 5,120", "no step"],
    ),
    "a phase without an end": (["phases=[{name: main}]"], ["phases.0.until is missing"]),
    "a phase with a field of nothing": (
        ["phases=[{name: main, until: 5k, model.seqlength: 8}]"],
        ["phase main: model.seqlength: there is no such field"],
    ),
    "a phase with a field of the whole run": (
        ["phases=[{name: main, until: 5k, optimizer.lr: 1.0}]"],
        ["phase main: optimizer.lr is one field of the whole run", "model.seq_length"],
    ),
    "a phase with a value of a wrong type": (
        ["phases=[{name: main, until: 5k, model.seq_length: long}]"],
        ["phase main: model.seq_length = 'long'"],
    ),
    "a phase that breaks a rule": (
        ["phases=[{name: main, until: 5k}, {name: wide, until: 9k, parallel.tp: 3}]"],
        ["phase wide: ", "parallel.tp = 3"],
    ),
    "a warm-up in steps of two sizes": (
        [
            "optimizer.warmup_steps=2",
            "phases=[{name: a, until: 5k}, {name: b, until: 9k, train.global_batch_size: 32}]",
        ],
        ["optimizer.warmup_steps = 2", "would jump", "warmup_tokens"],
    ),
    "longer samples than learned positions": (
        ["model.position=learned", "phases=[{name: a, until: 5k}, {name: b, until: 9k, model.seq_length: 128}]"],
        ["model.position = learned", "32 or 128", "model.position = rope"],
    ),
    "a phase of no run": (["train.steps=5", "train.phase=main"], ["train.phase = main", "the run has none"]),
    "a phase that is none of them": (
        ["train.phase=mian", "phases=[{name: main, until: 5k}]"],
        ["train.phase = mian", "must be one of the phases main"],
    ),
    "a value that every phase has": (
        ["train.micro_batch_size=1", "phases=[{name: main, until: 5k, train.micro_batch_size: 4}]"],
        ["train.micro_batch_size", "every phase has a value of its own"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_phases_are_refused_in_words(name: str) -> None:
    changes, words = BAD[name]
    legal = [word.replace(", micro_batch_size: 2", "") for word in _without_steps()]
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*legal, "checkpoint.interval=5", *changes])
    text = "\n".join(caught.value.problems)
    assert not [word for word in words if word not in text], text


def test_every_phase_is_checked_against_the_cluster() -> None:
    config = phased(
        "[{name: main, until: 5k, parallel.dp: 4}, {name: wide, until: 9k, parallel.tp: 2, parallel.dp: 4}]"
    )
    [problem] = problems(config, world_size=4)
    assert problem.startswith("phase wide: parallel = tp x pp x dp = 2 x 1 x 4"), problem


def test_a_phase_can_be_a_run_of_its_own() -> None:
    """As `verify` and `try` make one of the phase that a config is in."""
    there = at_phase(phased(f"[{{name: main, until: 5000}}, {LONGER}]"), "longer")
    tree = there.model_dump(mode="json")
    as_a_run(tree, 3)
    alone = Config.model_validate(tree)
    assert problems(alone) == []
    assert (alone.phases, alone.train.phase, alone.train.steps) == ([], None, 3)
    assert (alone.model.seq_length, alone.parallel.tp) == (128, 2)
