"""A continued run as YAML is the planned one, its length and rates follow their rules, and every value has its reason."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import batch_plan, planned_steps
from triaxis.engine.config.rules.problem import Subject
from triaxis.engine.config.rules.sizes import LIMITS
from triaxis.engine.data.corpus.indexed import IndexedTokens, IndexedWriter
from triaxis.engine.data.datasets import open_datasets
from triaxis.engine.errors import DataError
from triaxis.launch.tuning.machine import Machine
from triaxis.launch.tuning.planned_run import (
    EVAL_STEPS,
    MOST_STEPS_BETWEEN,
    PARTS,
    PlannedRun,
    plan_run,
    to_commented_yaml,
)
from triaxis.launch.tuning.recipe import GPT3, LEAST_STEPS, recipe, warm_up_steps
from triaxis.models.specs import num_parameters

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
LLAMA: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 160,
    "seq_length": 64,
    "vocab_size": 300,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": "none",
}
WINDOWS: dict[str, Any] = {
    "layers": ["local*2", "global"],
    "layer_kinds": {"local": {"window": 16, "rope_base": 1000.0}, "global": {"rope_base": 5000.0}},
}
EXPERTS: dict[str, Any] = {"layers": ["moe"], "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 96}}
MACHINES = {
    "one core": Machine(1, 1, 10**9, False, "1 CPU core"),
    "three cores": Machine(1, 3, 10**9, False, "3 CPU cores"),
    "GPUs": Machine(2, 8, 80 * 10**9, True, "16 GPUs"),
    "small cores": Machine(1, 8, 2 * 10**6, False, "8 small CPU cores"),
    "cores for experts": Machine(1, 8, 4 * 10**6, False, "8 CPU cores"),
}


def corpus(prefix: Path, num_documents: int, length: int = 70) -> IndexedTokens:
    with IndexedWriter(prefix, "<u2") as writer:
        for number in range(num_documents):
            writer.add_document([number % 300] * length)
    return IndexedTokens(prefix)


def planned(text: IndexedTokens, machine: str, num_tokens: int = 10**6, **more: dict[str, Any]) -> PlannedRun:
    return plan_run(
        {"model": LLAMA} | more,
        text,
        tokenizer="tokenizers/tokenizer.json",
        evidence="it is the corpus'",
        weights=Path("imported"),
        num_tokens=num_tokens,
        machine=MACHINES[machine],
    )


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "more",
    [{}, {"model": LLAMA | WINDOWS}, {"kernels": {"attention": "explicit"}}],
    ids=["alike", "kinds of layers", "kernels"],
)
def test_the_yaml_is_the_planned_run(tmp_path: Path, machine: str, more: dict[str, Any]) -> None:
    assert_yaml_is_the_run(planned(corpus(tmp_path / "corpus", 200), machine, **more), tmp_path, machine)


@pytest.mark.parametrize(
    ("more", "ep"), [({}, 4), ({"kernels": {"attention": "explicit"}}, 8)], ids=["alone", "with kernels"]
)
def test_the_yaml_has_the_ranks_of_experts_and_their_dispatch(tmp_path: Path, more: dict[str, Any], ep: int) -> None:
    run = planned(corpus(tmp_path / "corpus", 200), "cores for experts", model=LLAMA | EXPERTS, **more)
    assert run.config.parallel.ep == ep and run.config.kernels.dispatch == "all_to_all"
    assert_yaml_is_the_run(run, tmp_path, "cores for experts")


def assert_yaml_is_the_run(run: PlannedRun, tmp_path: Path, machine: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(to_commented_yaml(run, "two\nlines"))
    assert load_config(path, [], {}, world_size=MACHINES[machine].num_ranks) == run.config
    lines = path.read_text().splitlines()
    assert lines[:2] == ["# two", "# lines"] and max(map(len, lines)) < 150, max(lines, key=len)
    fields = [line for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert all("# " in line for line in fields), "a value without its reason"


@settings(max_examples=20)
@given(
    num_tokens=st.integers(1, 10**13),
    machine=st.sampled_from(sorted(MACHINES)),
    num_documents=st.sampled_from([2, 200]),
)
def test_a_run_has_its_tokens_and_no_step_more(
    tmp_path_factory: pytest.TempPathFactory, num_tokens: int, machine: str, num_documents: int
) -> None:
    run = planned(corpus(tmp_path_factory.mktemp("text") / "corpus", num_documents), machine, num_tokens)
    plan = batch_plan(run.config, run.chosen.sizes.dp)
    assert planned_steps(run.config) == plan.num_steps == run.num_steps
    assert (plan.num_steps - 1) * plan.tokens_per_step < num_tokens <= plan.num_steps * plan.tokens_per_step
    steps, optimizer = plan.num_steps, run.config.optimizer
    assert optimizer.warmup_steps == warm_up_steps(steps) and 0 <= optimizer.warmup_steps - steps / 100 < 1
    assert not [rule.key for rule in LIMITS if any(rule(Subject(run.config, None, None)))]
    interval = run.config.checkpoint.interval
    assert interval is not None and (interval == MOST_STEPS_BETWEEN or interval == 1 or steps // interval >= PARTS)
    is_split = num_documents == 200
    assert (run.config.eval.interval, run.config.data.split[1] > 0) == (interval if is_split else None, is_split)
    assert not is_split or run.config.eval.steps == EVAL_STEPS


def test_documents_are_held_back_where_they_hold_a_sample(tmp_path: Path) -> None:
    long, short, few = (
        corpus(tmp_path / "long", 100),
        corpus(tmp_path / "short", 100, 60),
        corpus(tmp_path / "few", 40),
    )
    assert [planned(text, "one core").config.data.split[1] for text in (long, short, few)] == [0.01, 0, 0]
    for text in (long, short, few):
        config = planned(text, "one core").config
        open_datasets(config.data, config.model.seq_length, 1, vocab_size=300)


def test_a_corpus_shorter_than_a_sample_is_refused(tmp_path: Path) -> None:
    planned(corpus(tmp_path / "enough", 1, 65), "one core")
    with pytest.raises(DataError, match="has 64 tokens, and a sample takes 65"):
        planned(corpus(tmp_path / "short", 1, 64), "one core")


def test_small_cores_share_the_model(tmp_path: Path) -> None:
    run = planned(corpus(tmp_path / "corpus", 20), "small cores")
    assert run.config.parallel.tp * run.config.parallel.pp > 1
    assert run.chosen.prediction.fullest.total <= 0.9 * 2 * 10**6


@pytest.mark.parametrize("name", ["125m", "1p3b", "2p7b", "175b"])
def test_the_recipe_is_that_of_the_shipped_gpt_3(name: str) -> None:
    config = load_config(CONFIGS / f"gpt_{name}.yaml", [], {})
    label = {"125m": "125M", "1p3b": "1.3B", "2p7b": "2.7B", "175b": "175B"}[name]
    row = next(row for row in GPT3 if row.name == label)
    assert (row.lr, row.lr / 10) == pytest.approx((config.optimizer.lr, config.optimizer.min_lr))
    assert row.tokens_per_step == config.train.global_batch_size * config.model.seq_length
    assert row.num_parameters == pytest.approx(num_parameters(config.model), rel=0.03)


@pytest.mark.parametrize(
    ("parameters", "row"),
    [(1, "125M"), (125 * 10**6, "125M"), (8 * 10**9, "13B"), (70 * 10**9, "175B"), (10**12, "175B")],
)
def test_the_row_is_the_first_that_is_as_large(parameters: int, row: str) -> None:
    found = recipe(parameters, 10**12, 4096)
    assert (found.row.name, found.is_as_large) == (row, parameters < 10**12)


def test_a_short_run_has_small_batches() -> None:
    assert recipe(10**8, 10**12, 512).samples_per_step == 2**19 // 512
    assert recipe(10**8, 10**8, 500).samples_per_step == 10**8 // LEAST_STEPS // 500
    assert recipe(10**8, 1, 512).samples_per_step == 1
    assert str(recipe(10**8, 1, 512).min_lr) == "6e-05"
