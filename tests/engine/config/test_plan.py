"""What follows from a configuration: batches, steps, sizes, stages and the local part of a sequence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.engine.config.bad_configs import config_with
from triaxis.engine.config.quantities.plan import balance_line, batch_plan, local_seq_length, parallel_sizes, stages_of
from triaxis.engine.config.quantities.stage_work import layers_forward_flops
from triaxis.engine.config.rules.check import broken_rules
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes


def test_stages_follow_the_layout() -> None:
    stages = stages_of(config_with("parallel={pp: 2, vpp: 2}"))
    assert [stage.layers for stage in stages] == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    listed = stages_of(config_with("parallel={pp: 2, layers_per_stage: [7, 1]}"))
    assert [len(stage.layers) for stage in listed] == [7, 1]


def test_auto_stages_count_the_head_and_windows() -> None:
    def counts(*words: str) -> list[int]:
        return [
            len(stage.layers) for stage in stages_of(config_with("parallel={pp: 4, layers_per_stage: auto}", *words))
        ]

    assert counts("model.vocab_size=16", "model.vocab_multiple=16") == [2, 2, 2, 2]
    assert counts("model.vocab_size=20000") == [2, 3, 3, 0]
    # Every other layer sees few of very many keys, so it is nearly free.
    kinds = ("model.layers=[near, near, near, far]", "model.layer_kinds={near: {window: 16}, far: {}}")
    windows = ("model.seq_length=65536", "model.vocab_size=16", "model.vocab_multiple=16", *kinds)
    with_windows = config_with("parallel={pp: 2, layers_per_stage: auto}", *windows)
    layers = layers_forward_flops(with_windows.model)
    assert layers[3] > 2 * layers[0] and layers[3] == layers[7] and len(set(layers)) == 2
    assert [len(stage.layers) for stage in stages_of(with_windows)] == [4, 4]
    assert "busiest rank" in balance_line(with_windows)


def test_tokens_ahead_are_on_the_last_stage_and_weigh_on_it() -> None:
    with_ahead = config_with("parallel={pp: 4, layers_per_stage: auto}", "model.mtp={num_layers: 1}")
    without = config_with("parallel={pp: 4, layers_per_stage: auto}")
    stages, own = stages_of(with_ahead), stages_of(without)
    assert [stage.num_mtp for stage in stages] == [0, 0, 0, 1]
    assert stages[-1].num_own < own[-1].num_own and sum(stage.num_own for stage in stages) == 8
    assert stages[-1].layers.stop == 9 and with_ahead.model.kinds[8].is_mtp and not with_ahead.model.kinds[7].is_mtp


@pytest.mark.parametrize("given", ["atuo", "3", "[1, a]", "[1, 2.5]"])
def test_other_layers_than_numbers_are_one_problem(given: str) -> None:
    with pytest.raises(ValidationError, match=r"auto, or null \(even\)") as raised:
        config_with(f"parallel.layers_per_stage={given}")
    assert raised.value.error_count() == 1


@pytest.mark.parametrize(("sequence_parallel", "length"), [("false", 32), ("true", 8)])
def test_sequence_parallelism_cuts_a_sequence_over_tp(sequence_parallel: str, length: int) -> None:
    assert local_seq_length(config_with(f"parallel={{tp: 4, sequence_parallel: {sequence_parallel}}}")) == length


def test_batch_plan_by_hand() -> None:
    plan = batch_plan(config_with(), dp=4)
    assert (plan.num_microbatches, plan.samples_per_step, plan.tokens_per_step, plan.num_steps) == (2, 16, 512, 10)
    assert (
        str(plan) == "16 samples per step = 2 microbatches of 2 x dp 4; 512 tokens per step x 10 steps = 5,120 tokens"
    )


@pytest.mark.parametrize(("tokens", "num_steps"), [(1, 1), (1024, 2), (1025, 3)])
def test_a_length_in_tokens_is_rounded_up_to_whole_steps(tokens: int, num_steps: int) -> None:
    assert batch_plan(config_with("train.steps=null", f"train.tokens={tokens}"), dp=1).num_steps == num_steps


@settings(max_examples=60, deadline=None)
@given(micro=st.integers(1, 9), dp=st.integers(1, 9), rest=st.integers(0, 80), rounds=st.integers(1, 9))
def test_a_batch_plan_loses_no_sample(micro: int, dp: int, rest: int, rounds: int) -> None:
    size = micro * dp * rounds + rest
    config = config_with(f"train.global_batch_size={size}", f"train.micro_batch_size={micro}")
    if rest % (micro * dp):
        with pytest.raises(ConfigError, match="multiple of micro_batch_size x dp"):
            batch_plan(config, dp)
    else:
        plan = batch_plan(config, dp)
        assert plan.num_microbatches * plan.micro_batch_size * plan.dp == plan.samples_per_step == size


def test_sizes_come_from_the_config_and_the_world() -> None:
    config = config_with("parallel={tp: 2, pp: 2, vpp: 2}")
    assert parallel_sizes(config, 16) == ParallelSizes(tp=2, pp=2, dp=4, vpp=2)
    assert parallel_sizes(config_with("parallel.dp=8")) == ParallelSizes(dp=8)
    for world_size, words in ((None, "is open"), (2, "world size 2"), (6, "world size 6")):
        with pytest.raises(ConfigError, match=words):
            parallel_sizes(config, world_size)
    with pytest.raises(ConfigError, match="is 8 and must be the world size 4"):
        parallel_sizes(config_with("parallel.dp=8"), 4)


def test_what_a_callee_refuses_is_said_as_the_rules_say_it() -> None:
    config = config_with("parallel={tp: 2, dp: 3}")
    world, batch = broken_rules(config, world_size=8)[0], broken_rules(config)[0]
    with pytest.raises(ConfigError) as refused:
        parallel_sizes(config, 8)
    assert world.rule in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        batch_plan(config, 3)
    assert batch.rule in str(refused.value)
