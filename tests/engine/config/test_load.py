"""Reading a configuration: where values come from, what is refused, what is written back."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from triaxis.engine.config.load import ENVIRONMENT, load_config
from triaxis.engine.config.names.foreign_names import ALWAYS_ON, FOREIGN_NAMES, NOT_BUILT, unknown_key
from triaxis.engine.config.schema.layout import ParallelConfig
from triaxis.engine.config.schema.section import Section
from triaxis.engine.config.tree import FORMAT_VERSION, Config
from triaxis.engine.config.values.sources import Source
from triaxis.engine.config.write import to_yaml
from triaxis.engine.errors import ConfigError

BASE = """\
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, seq_length: 32, vocab_size: 300}
data: {synthetic: true}
train: {steps: 10, global_batch_size: 16, micro_batch_size: 2}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def refused(path: Path | None, *overrides: str, environment: Mapping[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, environment)
    return caught.value


# Where values come from


def test_environment_overrides_the_file_and_the_command_line_overrides_both(base: Path) -> None:
    assert load_config(base).train.micro_batch_size == 2
    assert load_config(base, environment={"MICRO_BATCH_SIZE": "4"}).train.micro_batch_size == 4
    assert load_config(base, ["train.micro_batch_size=8"]).train.micro_batch_size == 8
    config = load_config(base, ["optimizer.lr=1e-3"], {"TP": "2", "PP": "2", "VPP": "2", "DP": "4", "RUN_NAME": "7"})
    assert (config.parallel.tp, config.parallel.pp, config.parallel.vpp, config.parallel.dp) == (2, 2, 2, 4)
    assert (config.runtime.name, config.optimizer.lr) == ("7", 1e-3)


def test_every_variable_sets_a_field_and_an_empty_one_sets_none(base: Path) -> None:
    assert set(ENVIRONMENT.values()) <= set(Config.dotted_names())
    assert load_config(base, environment=dict.fromkeys(ENVIRONMENT, "")) == load_config(base)


def test_environment_and_command_line_may_agree_but_not_disagree(base: Path) -> None:
    assert load_config(base, ["parallel.tp=2"], {"TP": "2"}).parallel.tp == 2
    message = str(refused(base, "parallel.tp=4", environment={"TP": "2"}))
    assert (
        "parallel.tp is given twice" in message and "TP=2 in the environment" in message and "parallel.tp=4" in message
    )


def test_overrides_that_contradict_each_other_are_refused(base: Path) -> None:
    assert "given twice" in str(refused(base, "train.steps=5", "train.steps=6"))


def test_a_section_given_as_a_mapping_is_its_keys_one_by_one(base: Path) -> None:
    config = load_config(base, ["parallel={pp: 2}", "telemetry={wandb: {project: p}}"], {"TP": "2"})
    assert (config.parallel.tp, config.parallel.pp, config.train.steps) == (2, 2, 10)
    assert config.telemetry.wandb is not None
    assert "TP=2 in the environment" in str(refused(base, "parallel={tp: 4}", environment={"TP": "2"}))


def test_nothing_lies_below_a_value(base: Path) -> None:
    assert "train.steps is a value, not a section" in str(refused(base, "train.steps.x=3"))
    assert "parallel.tp is a value" in str(refused(base, "parallel.tp.x=3"))


def test_overrides_reach_lists_and_sections_that_are_off(base: Path) -> None:
    overrides = [
        'data.train=[{path: "a b", weight: 0.7, name: x}, c]',
        "telemetry.wandb.project=p",
        "eval.interval=null",
    ]
    config = load_config(base, overrides)
    assert [(each.path, each.weight, each.title) for each in config.data.train] == [("a b", 0.7, "x"), ("c", 1.0, "c")]
    assert config.telemetry.wandb is not None and config.telemetry.wandb.project == "p"


def test_without_a_file_everything_may_come_from_overrides() -> None:
    assert load_config(None, [f"{name}={value}" for name, value in overrides_of(BASE)]).model.hidden_size == 64


def test_an_empty_section_is_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BASE + "parallel:\noptimizer:\n")
    assert load_config(path).parallel == ParallelConfig()


# Files that cannot be read


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["empty", "model and train"]),
        ("# only a comment\n", ["empty"]),
        ("- model\n- train\n", ["list", "mapping"]),
        ("just words", ["str", "mapping"]),
        ("model: {num_layers: 4\ntrain: 3", ["not readable as YAML", "line"]),
        ("\tmodel: 3", ["not readable as YAML", "line 1"]),
        (BASE + "train: {steps: 3}\n", ["'train' is given twice", "lines 3 and 4"]),
        (
            "model:\n  num_layers: 4\n  hidden_size: 8\n  num_layers: 5\n",
            ["'num_layers' is given twice", "lines 2 and 4"],
        ),
        ("? [model]\n: 3\n", ["not readable as YAML", "unhashable key"]),
        ("---\nmodel: 1\n---\nmodel: 2\n", ["not readable as YAML"]),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    message = str(refused(path))
    assert str(path) in message
    assert all(word in message for word in words), message


def test_a_missing_file_is_refused_with_its_nearest_neighbour(base: Path) -> None:
    message = str(refused(base.with_name("bse.yaml")))
    assert "no such file" in message and f"Did you mean {base}?" in message
    assert "no such file" in str(refused(base.parent / "nowhere" / "c.yaml"))


def test_a_folder_and_bytes_are_refused(tmp_path: Path) -> None:
    assert "cannot be read" in str(refused(tmp_path))
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as text" in str(refused(path))


@pytest.mark.parametrize("override", ["train.steps", "=3", "train..steps=3", ".steps=3", "--resume"])
def test_overrides_that_are_none(base: Path, override: str) -> None:
    assert f"{override!r} is not an override" in str(refused(base, override))


def test_an_override_that_is_no_yaml(base: Path) -> None:
    assert "not readable as YAML" in str(refused(base, "data.train=[p"))
    assert "is given twice" in str(refused(base, "model={num_layers: 1, num_layers: 2}"))


# Unknown keys


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("tensor-model-parallel-size", ["parallel.tp"]),
        ("tensor_model_parallel_size", ["parallel.tp"]),
        ("--pipeline-model-parallel-size", ["parallel.pp"]),
        ("parallel.tensor_model_parallel_size", ["parallel.tp"]),
        ("n_embd", ["model.hidden_size"]),
        ("model.n_embd", ["model.hidden_size"]),
        ("hidden_size", ["belongs to model.hidden_size"]),
        ("model.num_key_value_heads", ["model.num_kv_heads"]),
        ("model.rope_theta", ["model.rope_base"]),
        ("train.train_iters", ["train.steps"]),
        ("model.swiglu", ["model.activation=swiglu"]),
        ("model.tp", ["belongs to parallel.tp"]),
        ("lr", ["belongs to optimizer.lr"]),
        ("wandb", ["belongs to telemetry.wandb"]),
        ("tain", ["Did you mean train?"]),
        ("train.step", ["Did you mean train.steps?"]),
        ("optimizer.warmup_step", ["Did you mean optimizer.warmup_steps?"]),
        ("telemetry.wandb.projct", ["Did you mean telemetry.wandb.project?"]),
        ("train.tensor_model_paralel_size", ["Did you mean parallel.tp?"]),
        ("optimizer.use_distributed_optimizer", ["not a choice", "ZeRO-1"]),
        ("resilience.policy", ["section resilience has on_nonfinite"]),
        ("train.save_interval", ["here it is checkpoint.interval"]),
        ("model.num_experts", ["model.moe.num_experts"]),
        ("model.moe_aux_loss_coeff", ["another layout", "model.moe.balance"]),
        ("precision.fp4", ["known, not built yet", "FP4"]),
        ("precision.fp8_recipe", ["here it is precision.fp8.recipe"]),
        ("optimizer.kind", ["here it is optimizer.name"]),
        ("optimizer.zero_stage", ["parallel.zero"]),
        ("model.reset_position_ids", ["data.positions=document"]),
        ("model.sliding_window", ["here it is model.window"]),
        ("schedule.qqq", ["section schedule has name"]),
        ("zzz", ["the sections are model, data, train"]),
    ],
)
def test_unknown_keys_are_refused_with_the_name_that_was_meant(base: Path, key: str, words: list[str]) -> None:
    for error in (refused(base, f"{key}=1"), refused(with_key(base, key))):
        [problem] = [problem for problem in error.problems if problem.startswith((f"{key}:", f"{key} ("))]
        assert all(word in problem for word in words), problem


def test_the_keys_of_a_section_of_another_engine_get_ours(base: Path) -> None:
    keys = ("enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
    ours = ("dtype", "loss_scale.static", "loss_scale.initial", "loss_scale.window", "loss_scale.hysteresis")
    problems = refused(base, *(f"fp16.{key}=1" for key in keys), "fp16.auto_cast=1").problems
    assert [problem.partition(":")[0].partition(" ")[0] for problem in problems] == [
        "fp16",
        *(f"fp16.{key}" for key in keys),
    ]
    for problem, name in zip(problems, ("dtype", *ours, "loss_scale.minimum"), strict=True):
        assert f"here it is precision.{name}" in problem


def test_a_message_repeats_no_key_or_value_without_bound(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BASE + "".join(f"key{number}: 1\n" for number in range(9000)))
    error = refused(path, f"model.norm=[{'x, ' * 20_000}]", "train.steps=" + "9" * 4000)
    assert "the top level: 8,950 more unknown keys" in str(error) and len(str(error)) < 30_000
    assert len(str(refused(None, f"model.{'k' * 100_000}=1"))) < 5000


def test_names_of_others_lead_to_fields_that_exist() -> None:
    fields = set(Config.dotted_names())
    sections = {name for name in fields if Config.section_type(name.split(".")[0]) and "." not in name}
    for foreign, ours in FOREIGN_NAMES.items():
        name = ours.split("=")[0].split(" ")[0]
        assert name in fields - sections, f"{foreign} leads to {ours}"
        if "=" in ours:
            problem = unknown_key(f"model.{foreign}")
            assert ours in problem
            load_config(None, [*(f"{n}={v}" for n, v in overrides_of(BASE)), *([ours] if "_norm" not in ours else [])])
    for table in (FOREIGN_NAMES, ALWAYS_ON, NOT_BUILT):
        for name in table:
            assert name not in fields, f"{name} is a field of ours"


def test_names_that_yaml_does_not_read_as_text_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(BASE + "on: 3\n7: 4\n")
    assert [problem.split(":")[0] for problem in refused(path).problems] == ["True", "7"]


# Types


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("parallel.tp=two", ["parallel.tp = 'two'", "must be a whole number (tensor parallel"]),
        ("parallel.tp=0", ["parallel.tp = 0", "greater than 0"]),
        ("parallel.tp=on", ["parallel.tp = True", "yes or no"]),
        ("parallel.tp=1.5", ["parallel.tp = 1.5", "must be a whole number"]),
        (
            "checkpoint.interval=nver",
            ["interval = 'nver'", "such as 1000 or 1k, null (the last step and a stop), or never"],
        ),
        ("checkpoint.interval=0", ["checkpoint.interval = 0", "or never"]),
        ("checkpoint.interval=no", ["checkpoint.interval = False", "or never"]),
        ("optimizer.warmup_steps=-1", ["at least 0"]),
        ("optimizer.beta1=1.0", ["less than 1"]),
        ("optimizer.lr=.inf", ["optimizer.lr", "finite"]),
        ("model.norm=rmsnrom", ["layernorm, rmsnorm or rmsnorm_1p", "Did you mean rmsnorm?"]),
        ("precision.dtype=bfloat16", ["fp32 or float64. Did you mean bf16?"]),
        ("precision.dtype=BF16", ["Did you mean bf16?"]),
        ("precision.dtype=torch.float32", ["Did you mean fp32?"]),
        ("precision.dtype=half", ["Did you mean fp16?"]),
        ("precision.dtype=fp8", ["Did you mean bf16 with precision.fp8.recipe=tensorwise?"]),
        ("model.norm=RMSNorm", ["Did you mean rmsnorm?"]),
        ("model.bias=false", ["model.bias = False", "must be all, qkv or none. Did you mean none?"]),
        ("model.bias=true", ["Did you mean all?"]),
        ("model.bias='no'", ["Did you mean none?"]),
        ("model.position=NoPE", ["Did you mean none?"]),
        ("model.position=null", ["Did you mean none?"]),
        ("recompute.granularity=off", ["Did you mean none?"]),
        ("recompute.granularity=true", ["Did you mean full?"]),
        ("model.norm=LN", ["Did you mean layernorm?"]),
        ("kernels.attention=eager", ["Did you mean explicit?"]),
        ("kernels.dispatch=a2a", ["Did you mean all_to_all?"]),
        ("data.attention=document", ["Did you mean within?"]),
        ("schedule.name=1F1B", ["schedule.name = '1F1B'", "must be auto, gpipe, 1f1b,", "Did you mean 1f1b?"]),
        ("model.qk_norm=heads", ["model.qk_norm = 'heads'", "must be true, false, head or all_heads"]),
        ("data.train=[[0.7, a]]", ["write {path: a, weight: 0.7}"]),
        ("data.train=[{weight: 2}]", ["data.train.0.path is missing"]),
        ("data.train=[{path: a, weight: 0}, b]", ["data.train.0.weight = 0", "greater than 0"]),
        ("data.split=[0.9, 0.1]", ["data.split = [0.9, 0.1]", "lacks its entry 3"]),
        ("precision.fp8.bf16_layers=[1]", ["must have 2 entries, not 1"]),
        ("precision.fp8.bf16_layers=[-1, 0]", ["precision.fp8.bf16_layers.0 = -1", "at least 0"]),
        ("precision.fp8.bf16_layers=[true, 0]", ["a yes or no"]),
        ("data.train=[{path: a, weight: true}]", ["data.train.0.weight = True", "a yes or no"]),
        ('data.train=[{path: a, name: "b\\ec"}]', ["data.train.0.name", "one line"]),
        ("phases=[{name: a, until: true}]", ["phases.0.until = True", "a yes or no"]),
        ('phases=[{name: "a\\nb", until: 9}]', ["phases.0.name", "one line"]),
        ("precision.loss_scale.initial=1.0e+300", ["at most 1.84467"]),
        ("precision.loss_scale.static=1.0e-300", ["at least 5.96"]),
        ("telemetry.tensorboard=maybe", ["must be true or false (write event files"]),
        ("precision.dtype=np.Float32", ["Did you mean fp32?"]),
        ("precision.dtype='<f4'", ["Did you mean fp32?"]),
        ("precision.dtype=bf16-mixed", ["Did you mean bf16?"]),
        ("precision.dtype=torch.float8_e4m3fn", ["Did you mean bf16 with precision.fp8.recipe=tensorwise?"]),
        ("precision.moments=torch.float32", ["Did you mean full?"]),
        ("telemetry.wandb={entity: e}", ["telemetry.wandb.project is missing", "project of the run"]),
        ("telemetry.wandb=true", ["must be a section", "Write telemetry.wandb.project=NAME, or telemetry.wandb=null"]),
        ("telemetry.wandb=mine", ["must be a section", "Write telemetry.wandb.project=NAME"]),
        ("precision.fp8=on", ["must be a section", "Write precision.fp8={}, or precision.fp8=null"]),
        ("train=3", ["train = 3", "must be a section"]),
    ],
)
def test_wrong_types_are_named_with_their_rule(base: Path, override: str, words: list[str]) -> None:
    message = str(refused(base, override))
    assert all(word in message for word in words), message


def test_where_a_wrong_value_came_from_is_said(base: Path) -> None:
    assert "TP=x in the environment" in str(refused(base, environment={"TP": "x"}))
    assert "parallel.tp=x on the command line" in str(refused(base, "parallel.tp=x"))


def test_missing_fields_are_named_with_their_meaning() -> None:
    problems = refused(None, "model={hidden_size: 8}", "train={steps: 3}", "data.synthetic=true").problems
    assert [problem.split(" ")[0] for problem in problems] == ["model", "train.global_batch_size"]
    assert "model lacks num_layers, num_attention_heads, seq_length, vocab_size" in problems[0]
    without_sections = {problem.split(" ")[0] for problem in refused(None, "data.synthetic=true").problems}
    assert without_sections == {"model", "train.global_batch_size"}


def test_what_a_section_lacks_is_a_block_to_paste(tmp_path: Path) -> None:
    [of_model, _] = refused(None, "data.synthetic=true", "train.steps=1").problems
    said, *block = of_model.splitlines()
    assert said.startswith("model lacks num_layers, hidden_size, num_attention_heads, seq_length, vocab_size")
    assert any("# transformer layers" in line for line in block)
    path = tmp_path / "c.yaml"
    path.write_text(textwrap.dedent("\n".join(block)))
    load_config(path, ["data.synthetic=true", "train={steps: 1, global_batch_size: 1, micro_batch_size: 1}"])


def test_all_kinds_of_problems_are_reported_at_once(base: Path) -> None:
    """Unknown keys, types, and the rules that do not need the fields with wrong types."""
    overrides = [
        "train.step=3",
        "model.seq_length=abc",
        "parallel.tp=3",
        "precision={dtype: fp16, masters: split}",
        "parallel.sequence_parallel=true",
    ]
    problems = refused(base, *overrides).problems
    for words in (
        "train.step ",
        "model.seq_length = 'abc'",
        "num_attention_heads = 4: must be",
        "precision.masters = split",
    ):
        assert any(problem.startswith(words) or words in problem for problem in problems), words
    assert not any("must be a multiple of parallel.tp = 3 with sequence_parallel" in problem for problem in problems)


def test_a_wrong_value_does_not_count_as_the_default(base: Path) -> None:
    """The default kernel has no dropout of probabilities: a kernel that could not be read must not be taken for it."""
    problems = refused(base, "model.attention_dropout=0.1", "kernels.attention=[x]").problems
    assert [problem.split(" ")[0] for problem in problems] == ["kernels.attention"]


def test_valid_values_are_read_alike_with_and_without_a_mistake_elsewhere(base: Path) -> None:
    """Numbers count as text where text belongs, and numbers in quotes as numbers; a mistake must not change that."""
    overrides = [
        "runtime.name=7",
        "data.cache_dir=1.5",
        "parallel.tp='2'",
        "optimizer.lr=1e-3",
        "telemetry.wandb.project=9",
    ]
    assert load_config(base, overrides).runtime.name == "7"
    [problem] = refused(base, *overrides, "train.seed=x").problems
    assert problem.startswith("train.seed = 'x'")


def leaves(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name in section.model_fields:
        inner = section.section_type(name)
        if inner is None:
            yield f"{prefix}{name}"
        else:
            yield from leaves(inner, f"{prefix}{name}.")


@pytest.mark.parametrize("leaf", list(leaves(Config)))
def test_a_wrong_value_of_any_field_is_named_and_stops_no_other_check(base: Path, leaf: str) -> None:
    overrides = (
        ["telemetry.wandb.project=p"] if leaf.startswith("telemetry.wandb.") and not leaf.endswith("project") else []
    )
    problems = refused(base, *overrides, f"{leaf}={{a: {{b: 1}}}}", "precision.fp4=1").problems
    assert sum(problem.startswith(leaf) for problem in problems) >= 1, problems
    assert any("not built yet" in problem for problem in problems), problems
    assert not any("input should" in problem for problem in problems), problems


# Writing


text = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
paths = text.filter(lambda path: not path.startswith("~") and "$" not in path and "://" not in path)


@settings(max_examples=40, deadline=None)
@given(
    corpora=st.lists(
        st.tuples(st.floats(0.01, 1e6), paths), min_size=1, max_size=3, unique_by=lambda corpus: corpus[1]
    ),
    project=st.none() | text,
    tags=st.lists(text, max_size=3),
    lr=st.floats(1e-9, 1.0),
    describe=st.booleans(),
)
def test_what_is_written_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    corpora: list[tuple[float, str]],
    project: str | None,
    tags: list[str],
    lr: float,
    describe: bool,
) -> None:
    config = load_config(None, [f"{name}={value}" for name, value in overrides_of(BASE)])
    changed = config.model_copy(
        update={
            "data": config.data.model_copy(
                update={"train": [Source(path=path, weight=weight) for weight, path in corpora]}
            ),
            "optimizer": config.optimizer.model_copy(update={"lr": lr}),
            "parallel": config.parallel.model_copy(update={"pp": 2, "layers_per_stage": [1, 3]}),
            "telemetry": config.telemetry.model_validate({"wandb": project and {"project": project, "tags": tags}}),
        }
    )
    path = tmp_path_factory.mktemp("yaml") / "c.yaml"
    path.write_text(to_yaml(changed, describe=describe), encoding="utf-8")
    assert load_config(path) == changed


@pytest.mark.parametrize(
    ("interval", "saves", "every", "in_background"),
    [("null", True, None, False), ("never", False, None, False), ("1k", True, 1000, True)],
)
def test_what_an_interval_means(base: Path, interval: str, saves: bool, every: int | None, in_background: bool) -> None:
    """A save at the end alone has no training to hide behind, so it needs no copy of the state in host memory."""
    checkpoint = load_config(base, [f"checkpoint.interval={interval}"]).checkpoint
    assert (checkpoint.saves, checkpoint.every, checkpoint.in_background) == (saves, every, in_background)


def test_a_described_config_says_what_each_field_means(base: Path) -> None:
    lines = to_yaml(load_config(base, ["telemetry.wandb.project=p"]), describe=True).splitlines()
    fields = [line for line in lines if line.startswith(" ")]
    undescribed = [line for line in fields if "#" not in line and not line.endswith("wandb:")]
    assert len(fields) > 60 and not undescribed
    assert all(len(line) <= 132 for line in lines)


def test_a_config_cannot_be_changed(base: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_config(base).parallel.tp = 2  # type: ignore[misc]


def test_reading_a_config_imports_no_torch(base: Path) -> None:
    code = (
        "import sys; from triaxis.engine.config.quantities.plan import batch_plan; "
        "from triaxis.engine.config.load import load_config; "
        "from triaxis.engine.config.write import to_yaml; from triaxis.engine.config.rules.check import problems; "
        "config = load_config(sys.argv[1]); to_yaml(config); batch_plan(config, 2); problems(config, 8, 8); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(base)], check=False, timeout=60).returncode == 0


# Helpers


def overrides_of(yaml_text: str) -> list[tuple[str, str]]:
    """The sections of a YAML text of one line per section, as (name, value)."""
    return [(line.split(": ", 1)[0], line.split(": ", 1)[1]) for line in yaml_text.splitlines()]


def with_key(base: Path, dotted: str) -> Path:
    """A copy of the base file with one more key in it."""
    tree: dict[str, Any] = yaml.safe_load(base.read_text())
    *sections, key = dotted.split(".")
    at = tree
    for section in sections:
        at = at.setdefault(section, {"project": "p"} if section == "wandb" else {})
    at[key] = 1
    path = base.with_name("with_key.yaml")
    path.write_text(yaml.safe_dump(tree))
    return path


def test_the_format_of_a_config_has_a_version(base: Path) -> None:
    assert to_yaml(load_config(base)).startswith(f"format_version: {FORMAT_VERSION}\n")
    assert load_config(base, ["format_version=1"]) == load_config(base)
    for version in (FORMAT_VERSION + 1, 0, "one"):
        [problem] = refused(base, f"format_version={version}").problems
        assert problem.startswith("format_version = ") and f"version 1 to {FORMAT_VERSION}" in problem
