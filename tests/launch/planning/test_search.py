"""The planner's search: the same layouts as looking at every memory, reasons for the others, and a config that runs."""

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.documented import ROOT
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import batch_plan, parallel_sizes, stages_of
from triaxis.engine.config.rules.check import RULES, broken_keys, problems
from triaxis.engine.config.rules.problem import Subject
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.extension_parts import OwnCosts
from triaxis.engine.config.schema.fp8 import Fp8Config
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.record.metrics import Meter
from triaxis.launch.cli import main
from triaxis.launch.planning import legal_layouts as listing
from triaxis.launch.planning import search as planning
from triaxis.launch.planning.legal_layouts import blocks, legal_layouts
from triaxis.launch.planning.search import Plan, search
from triaxis.models.predict.cut import Memo
from triaxis.models.predict.rank_memory import predict
from triaxis.models.predict.recompute_choice import candidates
from triaxis.models.predict.step_time.cluster import Cluster, cluster_of
from triaxis.models.predict.step_time.estimate import Estimator
from triaxis.models.predict.step_time.implementation import OURS

pytestmark = pytest.mark.distributed

MODEL = {"num_layers": 4, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048, "vocab_size": 32000}


def config_of(**model: Any) -> Config:
    return Config.model_validate(
        {
            "model": {**MODEL, **model},
            "data": {"synthetic": True},
            "train": {"steps": 10, "global_batch_size": 16, "micro_batch_size": 1},
            "parallel": {"dp": 4},
            "precision": {"dtype": "bf16"},
        }
    )


MOE = {
    "layers": ["dense", "moe*3"],
    "moe": {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 8192},
    "activation": "swiglu",
    "bias": "none",
}

CLUSTER = Cluster("A100-SXM-80GB", 1, 4, 300.0, 25.0, 8.0, 1.0, 1.5)


def with_zero(config: Config, zero: int) -> Config:
    return with_value(config, "parallel.zero", zero)


def in_stage(trial: Config, sizes: ParallelSizes, zero: int, usable: int) -> Config | None:
    """The layout in this ZeRO stage with the least recomputation with which it fits."""
    for choice in candidates(trial, sizes):
        tried = with_zero(trial.model_copy(update={"recompute": choice}), zero)
        if predict(tried, sizes).fullest.total <= usable:
            return tried
    return None


def all_that_fit(config: Config, usable: int) -> list[tuple[float, str]]:
    """Try every layout in every stage that is needed, with every recomputation, and keep the fastest of each that fits."""
    estimator, found = Estimator(CLUSTER), []
    for trial, sizes in legal_layouts(config, CLUSTER):
        fitting = []
        for zero in (1, 2, 3) if sizes.owners("dp") > 1 else (1,):
            tried = in_stage(trial, sizes, zero, usable)
            if tried is not None:
                fitting.append((estimator.closed_form(tried, sizes).seconds, planning.describe(tried, sizes)))
                if not tried.recompute.is_any:
                    break
        found += [min(fitting)] if fitting else []
    return sorted(found)


def test_the_search_tries_every_legal_layout_but_those_that_another_beats() -> None:
    """A count by hand: four layers over four ranks, with a head of nearly a layer's work."""
    found: dict[tuple[int, int, int], set[tuple[int, str, object, bool, int]]] = {}
    for trial, sizes in legal_layouts(config_of(vocab_size=50304), CLUSTER):
        parallel = trial.parallel
        each = sizes.vpp, trial.schedule.name, parallel.layers_per_stage, parallel.sequence_parallel
        found.setdefault((sizes.tp, sizes.cp, sizes.pp), set()).add((*each, trial.train.micro_batch_size))
    assert found.keys() == {(t, c, p) for t in (1, 2, 4) for c in (1, 2, 4) for p in (1, 2, 4) if t * c * p <= 4}
    of_pp = {(vpp, name) for vpp, name, _, _, _ in found[1, 1, 2]}
    assert of_pp == {(1, "1f1b"), (1, "zb_h1"), (2, "interleaved"), (2, "zbv")}
    assert {micro for *_, micro in found[1, 1, 2]} == {1, 2, 4, 8}
    assert {is_cut for *_, is_cut, _ in found[2, 1, 2]} == {True, False}
    assert {is_cut for *_, is_cut, _ in found[1, 1, 2]} == {False}


def test_micro_batches_and_cp_need_not_be_powers_of_two() -> None:
    config = config_of(seq_length=1536, num_attention_heads=12, hidden_size=1536)
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": 12})})
    cluster = Cluster("A100-SXM-80GB", 1, 6, 300.0, 25.0, 8.0, 1.0, 1.5)
    sizes = {(sizes.cp, trial.train.micro_batch_size) for trial, sizes in legal_layouts(config, cluster)}
    assert {(3, 1), (6, 12), (3, 3), (1, 6)} <= sizes


def test_copies_of_the_state_are_kept_where_they_divide_the_replicas() -> None:
    config = with_value(config_of(), "parallel.dp_replicas", 2)
    assert {sizes.dp for _, sizes in legal_layouts(config, CLUSTER)} == {2, 4}


def test_stages_are_balanced_where_that_is_faster() -> None:
    """One layer of a pipeline's last rank is worth its head: without uneven stages the search finds a slower layout."""
    config = config_of(num_layers=8, vocab_size=152064)
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": 64})})
    trials = [
        (trial, sizes)
        for trial, sizes in legal_layouts(config, CLUSTER)
        if sizes.pp == 4 and trial.train.micro_batch_size == 1
    ]
    estimator = Estimator(CLUSTER)
    fastest = min(trials, key=lambda trial: estimator.simulated(*trial).seconds)[0]
    assert fastest.parallel.layers_per_stage == "auto"
    assert "balanced" in planning.describe(fastest, parallel_sizes(fastest))
    assert len({planning.describe(trial, sizes) for trial, sizes in trials}) == len(trials), "words tell layouts apart"


def test_layouts_that_share_what_is_counted_are_predicted_as_each_alone() -> None:
    """Two kinds of layers, and stages of both."""
    config = config_of(num_layers=6, layers=["local", "global"], layer_kinds={"local": {"window": 64}})
    memo: Memo = {}
    estimator = Estimator(CLUSTER)
    for trial, sizes in list(legal_layouts(config, CLUSTER))[::7]:
        assert estimator.closed_form(trial, sizes, memo=memo) == estimator.closed_form(trial, sizes)
        assert predict(trial, sizes, memo=memo) == predict(trial, sizes)


@pytest.mark.parametrize(("num_layers", "pp"), [(14, 2), (13, 3), (15, 4), (16, 2)])
def test_numbers_of_chunks_that_are_left_out_are_not_faster(num_layers: int, pp: int) -> None:
    """Simulated, beside those that the search tries."""
    config = config_of(num_layers=num_layers)
    cluster = Cluster("A100-SXM-80GB", 1, pp, 300.0, 25.0, 8.0, 1.0, 1.5)
    estimator = Estimator(cluster)
    tried = {
        (sizes.vpp, trial.parallel.layers_per_stage)
        for trial, sizes in legal_layouts(config, cluster)
        if sizes.pp == pp and trial.schedule.name == "interleaved"
    }
    seconds: dict[tuple[int, object], float] = {}
    for vpp in range(2, num_layers // pp + 1):
        for cut in (None, "auto"):
            parallel = config.parallel.model_copy(update={"pp": pp, "vpp": vpp, "dp": 1, "layers_per_stage": cut})
            schedule = config.schedule.model_copy(update={"name": "interleaved"})
            trial = config.model_copy(update={"parallel": parallel, "schedule": schedule})
            seconds[vpp, cut] = estimator.simulated(trial, parallel_sizes(trial)).seconds
    assert len(seconds) > len(tried) > 1
    assert min(seconds, key=lambda one: seconds[one]) in tried


@pytest.mark.parametrize("margin", [0.97, *(pytest.param(margin, marks=pytest.mark.slow) for margin in (0.95, 0.96))])
def test_the_search_finds_what_a_look_at_every_memory_finds(margin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory so short that layouts drop out and others recompute."""
    monkeypatch.setattr(planning, "MARGIN", margin)
    config = config_of()
    plan = search(config, CLUSTER, simulated=12)
    everything = all_that_fit(config, plan.usable_bytes)
    estimator = Estimator(CLUSTER)
    found = sorted((estimator.closed_form(one.config, one.sizes).seconds, one.layout) for one in plan.found)
    assert found == everything[:12]
    assert any("balanced" in layout for _, layout in everything)
    assert any("zero=" in layout for _, layout in everything)
    assert any(one.config.recompute.is_any for one in plan.found)


@pytest.mark.parametrize("model", [{}, {"num_layers": 5}, MOE], ids=["dense", "uneven", "experts"])
def test_no_layout_is_faster_than_the_bound_of_its_group(model: dict[str, Any]) -> None:
    """With any chunks, schedule, cut and micro batch; the bound of an ideal device holds for all micro batches."""
    estimator, memo = Estimator(CLUSTER), Memo()
    for block in list(blocks(config_of(**model), CLUSTER))[::3]:
        largest = [block.layout(block.micro_batches[-1], stages) for stages in block.deepest]
        ideal = min(estimator.least_of_smaller(*one, memo) for one in largest)
        for micro in block.micro_batches:
            least = min(estimator.least(*block.layout(micro, stages), memo) for stages in block.deepest)
            times = [estimator.closed_form(*block.layout(micro, each), memo=memo).seconds for each in block.stages]
            assert max(ideal, least) <= min(times)


@pytest.mark.parametrize("changes", [{}, {"offload.num_layers": 2, "model.num_attention_heads": 2}])
def test_rules_that_are_checked_once_for_many_layouts_say_the_same_of_each(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside all rules, checked for each layout."""
    config = config_of()
    for name, value in changes.items():
        config = with_value(config, name, value)
    found = {planning.describe(*one) for one in legal_layouts(config, CLUSTER)}
    monkeypatch.setattr(listing, "_legal_part", lambda block, cluster: block)
    everything = {
        planning.describe(trial, sizes)
        for trial, sizes in legal_layouts(config, CLUSTER)
        if not broken_keys(Subject(trial, 4, 4), RULES)
    }
    assert found == everything


def test_what_a_search_of_very_many_layouts_leaves_out_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = search(config_of(), CLUSTER, simulated=3)
    assert everything.num_left_out == 0
    monkeypatch.setattr(planning, "MOST_LAYOUTS", everything.num_legal - 1)
    plan = search(config_of(), CLUSTER, simulated=1000)
    assert plan.num_legal == everything.num_legal and 0 < plan.num_left_out < plan.num_legal
    assert all(one.sizes.tp == 1 or one.config.parallel.sequence_parallel for one in plan.found)
    assert main(["plan", "configs/gpt_1p3b.yaml", "--gpus", "8xH100", "--top", "1"]) == 0
    assert " were left out, so one of them may be faster: tp without" in " ".join(capsys.readouterr().out.split())


def test_found_layouts_are_legal_fit_and_are_ordered() -> None:
    plan = search(config_of(), CLUSTER, simulated=20)
    times = [one.time.seconds for one in plan.found]
    assert times == sorted(times) and plan.best.time.seconds == times[0]
    for one in plan.found:
        assert not problems(one.config, 4, 4)
        assert one.sizes.world_size == 4
        assert one.memory.fullest.total <= plan.usable_bytes
        assert sum(one.time.components.values()) == pytest.approx(one.time.seconds)
    held = [one.memory.fullest.total for one in plan.pareto]
    assert held == sorted(held, reverse=True) and plan.pareto[0] is plan.best
    assert {one.config.schedule.name for one in search(config_of(), CLUSTER, simulated=200).found} == {
        *("auto", "1f1b", "interleaved", "zb_h1", "zbv")
    }


def test_a_higher_stage_is_taken_where_a_lower_one_does_not_fit_or_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MARGIN", 0.96)
    plan, estimator = search(config_of(), CLUSTER), Estimator(CLUSTER)
    higher = [one for one in plan.found if one.config.parallel.zero > 1]
    assert {one.config.parallel.zero for one in higher} == {2, 3}
    for one in higher:
        assert f"zero={one.config.parallel.zero}" in one.cut
        assert not problems(one.config, 4, 4) and one.sizes.owners("dp") > 1
        for zero in range(1, one.config.parallel.zero):
            lower = in_stage(one.config, one.sizes, zero, plan.usable_bytes)
            seconds = math.inf if lower is None else estimator.closed_form(lower, one.sizes).seconds
            assert seconds >= estimator.closed_form(one.config, one.sizes).seconds
    words = [planning.describe_cut(with_zero(one.config, 1), one.sizes) for one in plan.found]
    assert len(set(words)) == len(words), "a layout is found in one stage"


@pytest.mark.slow
def test_a_stage_that_is_given_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(planning, "MARGIN", 0.97)
    assert all(one.config.parallel.zero == 1 for one in search(config_of(), CLUSTER, keeps_zero=True).found)
    assert all(one.config.parallel.zero == 2 for one in search(with_zero(config_of(), 2), CLUSTER).found)
    other = replace(OURS, name="other")
    assert all(one.config.parallel.zero == 1 for one in search(config_of(), CLUSTER, implementation=other).found)
    monkeypatch.setattr(planning, "MARGIN", 0.1)
    words = ["plan", "llama3_8b", "--gpus", "8xH100"]
    assert main([*words, "parallel.zero=1"]) == 0 and "zero=" not in capsys.readouterr().out
    assert main(words) == 0 and "tp=1 pp=1 dp=8 zero=2 mb=1" in capsys.readouterr().out


def test_a_stage_that_a_rule_refuses_is_skipped() -> None:
    config = config_of(activation="swiglu", bias="none")
    zero3 = with_value(with_zero(config, 3), "precision.fp8", Fp8Config())
    assert problems(zero3, 4, 4)[0].startswith("parallel.zero = 3")
    config = with_zero(zero3, 1)
    sizes = parallel_sizes(config)
    # Times of FP8 are unknown, so a stand-in has the estimator's part.
    estimator: Any = SimpleNamespace(closed_form=lambda *args, **kwargs: None)
    second = planning._Waiting(estimator.closed_form(), config, sizes).in_next_stage()
    assert second is not None and second.parallel.zero == 2
    assert planning._Waiting(estimator.closed_form(), second, sizes).in_next_stage() is None


def test_what_fits_nowhere_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"no layout on 4 x A100-SXM-80GB fits: the nearest of .* does not fit: .* needs .* GB of 76"
    ):
        search(config_of(num_layers=96, hidden_size=12288, num_attention_heads=96), CLUSTER)


def test_rules_that_leave_no_layout_are_named() -> None:
    """One head has no tp, and one layer no pp; one sample has no replicas. Samples of odd length cannot be cut over cp."""
    config = config_of(num_layers=1, num_attention_heads=1, seq_length=63)
    train = config.train.model_copy(update={"global_batch_size": 1})
    with pytest.raises(ConfigError, match=r"no layout on 64 devices is legal. Fields that break rules: "):
        search(config.model_copy(update={"train": train}), cluster_of("64xH100"))


def test_the_command_prints_layouts_and_writes_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.yaml"
    words = ["plan", "configs/gpt_1p3b.yaml", "--gpus", "8xH100", "--tokens", "26B", "--top", "3", "--output", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "legal layouts" in printed and "GPU-hours" in printed and f"wrote {out}" in printed
    lines = printed.splitlines()
    widest = max(len(line) for line in lines if not line.startswith("wrote"))
    assert widest <= 100 and "…" not in printed, "nothing is cut, and a pipe has 100 columns"
    # What was asked, on what, and the answer.
    assert lines[0] == "configs/gpt_1p3b.yaml on 1 x 8 H100-SXM-80GB"
    assert (
        lines[1] == "memory of a GPU: 72.0 GB of 85.5 GB may be filled: 10% and a margin of 5.0 GB (--margin) stay free"
    )
    assert "The fastest: tp=" in lines[2] and " TFLOP/s per GPU, MFU " in lines[3]
    config = load_config(out, [], {}, world_size=8)
    assert not problems(config, 8, 8)
    assert config.train.global_batch_size == load_config(Path("configs/gpt_1p3b.yaml"), [], {}).train.global_batch_size
    assert main(["plan", "configs/gpt_1p3b.yaml", "--gpus", "8xNoSuch"]) == ConfigError.exit_code
    # A layout of its own, here of 8 ranks, does not bind the search.
    assert main(["plan", "gpt_tiny", "--gpus", "2xH100", "precision.dtype=bf16", "--top", "1"]) == 0


def test_a_margin_stays_free_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    free = search(config_of(), CLUSTER, simulated=3)
    plan = search(config_of(), CLUSTER, simulated=3, margin_bytes=5 * 10**9)
    assert plan.usable_bytes == free.usable_bytes - 5 * 10**9
    # The first fills more than what is left, so it is another one now.
    short = search(
        config_of(), CLUSTER, simulated=3, margin_bytes=free.usable_bytes - free.best.memory.fullest.total + 1
    )
    assert short.best.memory.fullest.total <= short.usable_bytes < free.best.memory.fullest.total
    assert "a margin of 5.0 GB (--margin) stay free" in plan.memory_line and "margin" not in free.memory_line
    with pytest.raises(ConfigError, match=r"but only 76\.7 GB may be used, so nothing would fit\. Give a smaller one"):
        search(config_of(), CLUSTER, margin_bytes=80 * 10**9)
    assert main(["plan", "configs/gpt_1p3b.yaml", "--gpus", "8xH100", "--margin", "-1"]) == ConfigError.exit_code
    assert "--margin -1: it is a number of GB from 0 on" in capsys.readouterr().err


def test_mfu_is_that_of_a_run_with_these_seconds() -> None:
    """The meter of a training run, given the predicted seconds, comes to the same numbers."""
    best = search(config_of(num_layers=6), CLUSTER, simulated=1).best
    layers = [len(stage.layers) for stage in stages_of(best.config)]
    meter = Meter(
        best.config,
        batch_plan(best.config, best.sizes.dp),
        layers_per_chunk=layers,
        world_size=4,
        device_name="NVIDIA A100-SXM4-80GB",
        attempt=0,
    )
    step = {
        "loss": 1.0,
        "loss_tokens": 1,
        "lr": 0.1,
        "grad_norm": 1.0,
        "unix_time_seconds": 0.0,
        "peak_memory_bytes": 0,
    }
    metrics = meter.measure(1, spans_seconds={StepPart.FORWARD_BACKWARD: best.time.seconds}, **step)
    assert best.model_tflops == pytest.approx(metrics.model_tflops_per_device)
    assert Plan(CLUSTER, 0).mfu(best) == pytest.approx(metrics.mfu)


def test_experts_are_cut_in_every_way_that_fills_the_ranks() -> None:
    found = {
        (sizes.tp, sizes.pp, sizes.ep, sizes.etp): planning.describe(trial, sizes)
        for trial, sizes in legal_layouts(config_of(**MOE), CLUSTER)
    }
    of_one_stage = {(tp, ep, etp) for tp, pp, ep, etp in found if pp == 1}
    assert of_one_stage == {
        *((tp, ep, 1) for tp in (1, 2, 4) for ep in (1, 2, 4)),
        *((2, 1, 2), (2, 2, 2), (4, 1, 4)),
    }
    assert {(ep, etp) for tp, pp, ep, etp in found if (tp, pp) == (2, 2)} == {(1, 1), (2, 1), (1, 2)}
    assert "ep=2 etp=2" in found[2, 1, 2, 2]


def test_layouts_with_experts_that_share_what_is_counted_are_predicted_as_each_alone() -> None:
    memo: Memo = {}
    estimator = Estimator(CLUSTER, expert_load=1.5)
    for trial, sizes in list(legal_layouts(config_of(**MOE), CLUSTER))[::11]:
        assert estimator.closed_form(trial, sizes, memo=memo) == estimator.closed_form(trial, sizes)
        assert predict(trial, sizes, memo=memo) == predict(trial, sizes)


def test_experts_that_one_gpu_cannot_hold_are_cut() -> None:
    """2.4 billion parameters: 18 bytes each without a cut; no load of experts makes a layout faster or smaller."""
    config = config_of(**(MOE | {"num_layers": 8, "layers": ["moe"]}))
    plan = search(config, CLUSTER, simulated=10)
    assert plan.best.sizes.ep * plan.best.sizes.tp * plan.best.sizes.pp > 1
    assert plan.best.time.components["experts"] > 0 or plan.best.sizes.ep * plan.best.sizes.etp == 1
    loaded = search(config, CLUSTER, simulated=10, expert_load=3.0)
    assert loaded.best.time.seconds > plan.best.time.seconds


def test_an_extension_is_measured_in_the_layouts_that_are_fastest() -> None:
    extension = ROOT / "examples" / "scaled_mlp" / "scaled_mlp.py"
    config, asked = config_of(extension=str(extension)), list[tuple[int, int]]()

    def measure(config: Config, sizes: ParallelSizes) -> OwnCosts:
        asked.append((sizes.tp, config.train.micro_batch_size))
        return OwnCosts(kept=Fraction(60_000, sizes.tp), weights=10**7)

    plain, plan = search(config, CLUSTER, simulated=3), search(config, CLUSTER, simulated=3, measure=measure)
    assert plan.num_legal == plain.num_legal > len(asked) >= len(plan.found) == 3
    assert all(one.config.model.own_costs.kept == Fraction(60_000, one.sizes.tp) for one in plan.found)
    of_plain = {one.layout: one for one in search(config, CLUSTER, simulated=plain.num_legal).found}
    for one in plan.found:
        if (before := of_plain.get(one.layout)) is not None:
            assert one.time.seconds > before.time.seconds and one.memory.fullest.total > before.memory.fullest.total
    assert any(one.layout in of_plain for one in plan.found)
