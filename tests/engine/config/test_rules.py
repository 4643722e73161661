"""Broken rules: each is found, says the words that matter, and names only values that are really legal."""

import re
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.engine.config.bad_configs import BAD, LEGAL, config_with
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import batch_plan, parallel_sizes, stages_of
from triaxis.engine.config.rules.check import RULES, broken_rules, problems
from triaxis.engine.config.rules.layout import nodes_are_whole
from triaxis.engine.config.rules.problem import Subject, divisors, multiples, numbers
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.training import MOST_STEPS
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError, TopologyError
from triaxis.engine.layout.partition import partition
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.layout.rank_rules import MOST_RANKS
from triaxis.engine.layout.shard_spec import localize
from triaxis.engine.pipeline import schedules
from triaxis.models.specs import model_specs


def test_the_legal_config_is_legal() -> None:
    assert problems(config_with()) == []
    assert load_config(None, LEGAL) == config_with()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_config_is_refused_with_the_words_that_matter(name: str) -> None:
    changes, cluster, words = BAD[name]
    [message] = problems(config_with(*changes), **cluster)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize("name", [name for name, (_, cluster, _) in BAD.items() if not cluster])
def test_values_that_a_message_names_are_legal_when_typed_in(name: str) -> None:
    """From the text of the message to the command line, as a user would go."""
    changes, _, _ = BAD[name]
    with pytest.raises(ConfigError) as caught:
        load_config(None, merged(changes))
    [message] = caught.value.problems
    named = re.search(r"Nearest legal: (.*?)\.(?: [A-Z]|$)", message)
    if named is None:
        no_value_mends = (
            *("no length", "two corpora of one name", "a corpus twice", "an empty name"),
            *("kinds of layers that no layer is of", "a pattern of unknown kinds", "a pattern without a count"),
            *("a kind that no layer names", "a scaling without its factor", "a scaling with another's field"),
            *(
                "a rotation of less than a pair",
                "experts that no layer has",
                "a kind that exists",
                "a kind without its section",
                "a group that freezes and updates",
                "a kind's share of latents",
                "a kind that rotates beside a table",
                "a parameter of a part that tp cannot cut",
                "a corpus that no extension gives",
            ),
        )
        assert name in (
            *no_value_mends,
            "a difference that is no field",
            "a group of nothing",
            "two phases of one name",
        ), message
        return
    for choice in named[1].split("; "):
        field, _, values = choice.partition(" = ")
        for value in values.split(" or "):
            load_config(None, merged([*changes, f"{field}={value}"]))


def merged(changes: Sequence[str], unchecked: Mapping[str, object] = MappingProxyType({})) -> list[str]:
    """LEGAL and changes to it as overrides of which none repeats another's key; `unchecked` may hold illegal values."""
    tree = config_with(*changes).model_dump(mode="json", exclude_unset=True)
    for dotted, value in unchecked.items():
        section, _, name = dotted.partition(".")
        tree.setdefault(section, {})[name] = value
    return [f"{section}={yaml.safe_dump(values, default_flow_style=True)}" for section, values in tree.items()]


def test_every_rule_is_broken_by_some_bad_config() -> None:
    seen = set()
    for changes, cluster, _ in BAD.values():
        subject = Subject(config_with(*changes), cluster.get("world_size"), cluster.get("ranks_per_node"))
        seen |= {rule for rule in RULES if list(rule(subject))}
    assert not [rule for rule in RULES if rule not in seen]


@pytest.mark.parametrize(
    "changes",
    [
        ["parallel.sequence_parallel=true"],
        ["model.position=learned", "model.hidden_size=40"],
        ["model.num_kv_heads=2", "parallel.tp=8"],
        ["model.num_kv_heads=1", "parallel.tp=4"],
        ["parallel.pp=3"],
        ["parallel.pp=2", "parallel.layers_per_stage=[8, 0]"],
        ["parallel.vpp=2", "schedule.name=interleaved"],
        ["parallel.pp=4", "schedule.name=gpipe"],
        ["model.attention_dropout=0.1", "kernels.attention=explicit"],
        ["data={synthetic: true}", "model.vocab_size=100"],
        ["data.tokenizer=tokenizer.json", "model.vocab_size=100"],
        ["data.split=[98, 2, 0]"],
        ["data.split=[1, 0, 0]", "eval.interval=5", "data.valid=v"],
        ["runtime.deterministic=true", "precision.dtype=float64", "model.qk_norm=true"],
        ["optimizer.warmup_steps=10"],
        ["optimizer.lr_schedule=constant"],
        ["parallel.pp=2", "recompute={granularity: full, method: block, num_layers: 4}"],
        ["train.steps=null", "train.tokens=1"],
    ],
)
def test_what_only_looks_wrong_is_legal(changes: list[str]) -> None:
    assert problems(config_with(*changes)) == []


def test_all_problems_are_found_together() -> None:
    changes = [
        "model.num_kv_heads=3",
        "parallel.tp=3",
        "train.steps=null",
        "precision.moments=bf16",
        "precision.dtype=fp32",
        "parallel.dp=5",
    ]
    found = problems(config_with(*changes), world_size=7, ranks_per_node=2)
    starts = [message.split(" = ")[0] for message in found]
    assert starts == [
        "model.num_kv_heads",
        "model.num_attention_heads",
        "model.ffn_hidden_size",
        "parallel",
        "train.steps",
        "precision.moments",
    ]


def test_recompute_may_reach_the_layers_of_the_largest_chunk() -> None:
    for pp, vpp in ((1, 1), (3, 1), (2, 2), (3, 2), (8, 1)):
        largest = max(len(stage.layers) for stage in partition(8, pp, vpp))
        layout = f"parallel={{pp: {pp}, vpp: {vpp}}}"
        for num_layers, is_legal in ((largest, True), (largest + 1, False)):
            config = config_with(layout, f"recompute={{granularity: full, num_layers: {num_layers}}}")
            assert (problems(config) == []) == is_legal


LARGEST = {
    "model.num_layers": 10_000,
    "model.hidden_size": 2**24,
    "model.ffn_hidden_size": 2**24,
    "model.num_attention_heads": 2**16,
    "model.seq_length": 2**30,
    "model.vocab_size": 2**28,
    "parallel.tp": MOST_RANKS,
    "parallel.pp": MOST_RANKS,
    "parallel.dp": MOST_RANKS,
    "runtime.ranks_per_node": MOST_RANKS,
    "runtime.hang_seconds": 30 * 24 * 3600,
}
"""By field, the largest value that it may have."""


@pytest.mark.parametrize("field", LARGEST)
def test_a_field_beyond_its_bound_is_refused_in_words(field: str) -> None:
    for value in (LARGEST[field] + 1, 10**22 + 1):
        with pytest.raises(ConfigError) as caught:
            load_config(None, merged([], {field: value}))
        assert f"must be at most {LARGEST[field]:,}" in str(caught.value)


def test_a_run_has_a_largest_number_of_steps() -> None:
    assert problems(config_with(f"train.steps={MOST_STEPS}")) == []
    with pytest.raises(ConfigError, match=f"must be at most {MOST_STEPS:,}"):
        load_config(None, merged([], {"train.steps": MOST_STEPS + 1}))


def test_the_largest_numbers_are_answered_at_once() -> None:
    started = time.perf_counter()
    for field, value in (*LARGEST.items(), ("train.global_batch_size", 10**18 - 1)):
        changes = [
            f"{field}={value}",
            "parallel.sequence_parallel=true",
            "recompute={granularity: full, num_layers: 2}",
        ]
        problems(config_with(*changes), world_size=10**22 + 1, ranks_per_node=8)
    assert time.perf_counter() - started < 10


def test_a_timeout_is_a_time_that_can_be_waited() -> None:
    for seconds in ("1e300", "0.0001", "0"):
        with pytest.raises(ConfigError, match=r"runtime.timeout_seconds .*: must be at (most 2,592,000|least 1)"):
            load_config(None, [*LEGAL, f"runtime.timeout_seconds={float(seconds)}"])


def test_no_proposal_is_outside_of_the_bounds_of_its_field() -> None:
    most = 30 * 24 * 3600
    [message] = problems(config_with(f"runtime={{hang_seconds: {most}, timeout_seconds: 600}}"))
    assert "5.184e+06" not in message and "hang_seconds = 300 or null" in message


def test_a_proposal_mends_all_rules_that_the_field_breaks() -> None:
    """tp = 64 does not divide a world of 96, nor 8 heads: 48 would fill the world, and the heads would refuse it."""
    found = problems(config_with("parallel.tp=64", "train.global_batch_size=192"), world_size=96)
    [world] = [message for message in found if message.startswith("parallel = ")]
    assert "parallel.tp = 8 or 4" in world, world


@pytest.mark.parametrize("name", ["x" * 129, "one\ntwo", "a\x1b[2Jb"])
def test_a_run_name_is_one_short_line(name: str) -> None:
    config = with_value(config_with(), "runtime.name", name)
    [message] = problems(config)
    assert "one line of at most 128 printable characters" in message and "\n" not in message and "\x1b" not in message


few = st.sampled_from
CONFIGS = st.builds(
    lambda **fields: config_with(*(f"{name.replace('__', '.')}={value}" for name, value in fields.items())),
    model__num_layers=st.integers(1, 12),
    model__hidden_size=few([12, 16, 40, 64, 96]),
    model__num_attention_heads=few([1, 2, 3, 4, 6, 8, 12]),
    model__num_kv_heads=few(["null", 1, 2, 3, 4, 6]),
    model__ffn_hidden_size=few(["null", 24, 50, 96]),
    model__seq_length=few([8, 12, 30]),
    model__vocab_multiple=few([1, 8, 100, 128]),
    model__tie_embeddings=few(["true", "false"]),
    model__activation=few(["gelu", "swiglu"]),
    parallel__tp=few([1, 2, 3, 4, 6, 8]),
    parallel__pp=st.integers(1, 4),
    parallel__vpp=st.integers(1, 3),
    parallel__dp=few(["null", 1, 2, 3, 4]),
    parallel__sequence_parallel=few(["true", "false"]),
    parallel__layers_per_stage=few(["null", "null", "[4, 4]", "[3, 0, 5]"]),
    schedule__name=few(["auto", "auto", "1f1b", "interleaved"]),
    train__global_batch_size=few([6, 8, 12, 48]),
    train__micro_batch_size=few([1, 2, 3]),
    recompute__granularity=few(["none", "full"]),
    recompute__num_layers=few([1, 1, 3]),
)


@settings(max_examples=60, deadline=None)
@given(config=CONFIGS, world_size=few([None, 8, 12, 16, 24]), ranks_per_node=few([None, 4, 8]))
def test_every_named_value_mends_its_problem_and_breaks_nothing(
    config: Config, world_size: int | None, ranks_per_node: int | None
) -> None:
    before = {problem.key + problem.rule for problem in broken_rules(config, world_size, ranks_per_node)}
    for problem in broken_rules(config, world_size, ranks_per_node):
        for name, values in problem.candidates.items():
            for value in values:
                after = broken_rules(with_value(config, name, value), world_size, ranks_per_node)
                assert len(after) < len(before), f"{name} = {value} for: {problem}"


MOSTLY_LEGAL = st.builds(
    lambda **fields: config_with(*(f"{name.replace('__', '.')}={value}" for name, value in fields.items())),
    model__num_layers=st.integers(4, 12),
    model__hidden_size=few([24, 48, 96]),
    model__num_attention_heads=few([4, 12]),
    model__num_kv_heads=few(["null", 1, 2, 4]),
    model__vocab_multiple=few([8, 12, 128]),
    model__tie_embeddings=few(["true", "false"]),
    model__activation=few(["gelu", "swiglu"]),
    parallel__tp=few([1, 2, 3, 4, 6]),
    parallel__pp=st.integers(1, 4),
    parallel__vpp=st.integers(1, 3),
    parallel__sequence_parallel=few(["true", "false"]),
    train__global_batch_size=few([24, 48]),
)


@settings(max_examples=100, deadline=None)
@given(config=MOSTLY_LEGAL, world_size=few([12, 24, 48]), ranks_per_node=few([None, 4, 12]))
def test_a_legal_config_can_be_built(config: Config, world_size: int, ranks_per_node: int | None) -> None:
    """The rules and the code that they protect agree: nothing that comes after the check refuses a config that passed."""
    assume(not problems(config, world_size, ranks_per_node))
    parallel, sizes = config.parallel, parallel_sizes(config, world_size)
    RankGrid(sizes, ranks_per_node)
    assert batch_plan(config, sizes.dp).num_microbatches >= 1
    assert schedules.resolve(config.schedule.name, sizes.vpp)
    stages = stages_of(config)
    assert sum(len(stage.layers) for stage in stages) == config.model.num_layers
    for spec in model_specs(config.model):
        for index in range(sizes.tp):
            localize(spec, tp=sizes.tp, tp_index=index, sequence_parallel=parallel.sequence_parallel)


@settings(max_examples=200, deadline=None)
@given(
    tp=few([1, 2, 3, 4, 8, 16]),
    pp=st.integers(1, 4),
    dp=st.integers(1, 6),
    per_node=few([1, 2, 3, 4, 8]),
    allow=st.booleans(),
)
def test_the_rules_about_nodes_are_those_of_the_rank_grid(
    tp: int, pp: int, dp: int, per_node: int, allow: bool
) -> None:
    layout = [
        f"parallel.tp={tp}",
        f"parallel.pp={pp}",
        f"parallel.dp={dp}",
        f"parallel.allow_tp_across_nodes={str(allow).lower()}",
    ]
    config = config_with(*layout)
    found = [problem.rule for problem in nodes_are_whole(Subject(config, None, per_node))]
    try:
        RankGrid(parallel_sizes(config), per_node, allow_tp_across_nodes=allow)
    except TopologyError as error:
        assert len(found) == 1 and found[0] in str(error)
    else:
        assert not found


@settings(max_examples=60, deadline=None)
@given(
    name=few(["auto", "gpipe", "1f1b", "interleaved"]),
    vpp=st.integers(1, 3),
    layers=st.lists(st.integers(-1, 5), max_size=6) | st.none(),
)
def test_the_rules_about_stages_are_those_of_the_pipeline(name: str, vpp: int, layers: list[int] | None) -> None:
    config = config_with(
        f"parallel={{pp: 2, vpp: {vpp}, layers_per_stage: {'null' if layers is None else layers}}}",
        f"schedule.name={name}",
    )
    found = [problem.key for problem in broken_rules(config)]
    if "schedule.name" not in found:
        assert schedules.build(schedules.resolve(name, vpp), 2, vpp, 4).placement.vpp == vpp
    try:
        partition(config.model.num_layers, 2, vpp, layers)
        assert not {"parallel.layers_per_stage", "model.num_layers"} & set(found)
    except AssertionError:
        assert {"parallel.layers_per_stage", "model.num_layers"} & set(found)


@settings(max_examples=60, deadline=None)
@given(of=st.integers(1, 60), near=st.integers(1, 300))
def test_candidates_come_nearest_first(of: int, near: int) -> None:
    for values in (multiples(of, near), divisors(of, near), numbers(near)):
        first = [value for value, _ in zip(values, range(8), strict=False)]
        assert first and min(first) >= 1
    nearest = next(multiples(of, near))
    assert nearest % of == 0 and abs(nearest - near) == min(abs(k * of - near) for k in range(1, near // of + 2))
    assert all(of % value == 0 for value in divisors(of, near))
    distances = [abs(value - near) for value in divisors(of, near)]
    assert distances == sorted(distances)
