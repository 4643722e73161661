"""The Estimator: closed form and simulator, and what makes a step longer or shorter."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.documented import ROOT
from tests.models.predict.step_time.layouts import layout
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.simulate import simulate
from triaxis.models.predict.device import load_device
from triaxis.models.predict.step_time.cluster import Cluster, cluster_of
from triaxis.models.predict.step_time.estimate import SIMULATED_ROUNDS, Estimator, StepTime
from triaxis.models.predict.step_time.implementation import OURS, Implementation
from triaxis.models.specs import num_parameters

WIDE = {"hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096, "vocab_size": 32768}


def estimator(config: Config, how: Implementation = OURS, cluster: Cluster | None = None) -> Estimator:
    return Estimator(cluster or cluster_of(f"{parallel_sizes(config).world_size}xH100"), how)


def step(config: Config, how: Implementation = OURS, *, simulated: bool = False) -> StepTime:
    of = estimator(config, how)
    return (of.simulated if simulated else of.closed_form)(config, parallel_sizes(config))


@settings(max_examples=25, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2]),
    vpp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    full=st.booleans(),
)
def test_components_add_up_and_none_is_negative(tp: int, pp: int, dp: int, vpp: int, cp: int, full: bool) -> None:
    vpp = vpp if pp > 1 else 1
    recompute = {"granularity": "full"} if full else {}
    config = layout(tp=tp, pp=pp, dp=dp, vpp=vpp, cp=cp, microbatches=8, recompute=recompute, model=WIDE)
    if parallel_sizes(config).world_size > 8 and parallel_sizes(config).world_size % 8:
        return
    for simulated in (False, True):
        found = step(config, simulated=simulated)
        assert sum(found.components.values()) == pytest.approx(found.seconds)
        assert all(seconds >= -1e-9 for seconds in found.components.values()), found.components
        assert (found.components["recompute"] > 0) == full


@pytest.mark.parametrize(("schedule", "vpp"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1)])
def test_formula_and_simulator_agree_on_even_stages(schedule: str, vpp: int) -> None:
    model = {**WIDE, "vocab_size": 128, "num_layers": 32}
    config = layout(pp=4, vpp=vpp, microbatches=16, schedule=schedule, model=model)
    assert step(config).seconds == pytest.approx(step(config, simulated=True).seconds, rel=0.01)


def test_long_steps_go_on_at_the_pace_of_the_last_round() -> None:
    config = layout(pp=4, microbatches=64, model=WIDE)
    of, sizes = estimator(config), parallel_sizes(config)
    assert SIMULATED_ROUNDS * sizes.pp < 64
    found = of.simulated(config, sizes)
    span = simulate(schedules.of_step(config, sizes), of.costs(config, sizes)).span
    rest = found.components["dp"] + found.components["optimizer"]
    assert found.seconds - rest == pytest.approx(span, rel=1e-9)


def test_every_pipeline_rank_takes_the_step_and_the_slowest_one_waits_least() -> None:
    """The head makes the last of four stages the slowest; the others wait for it, and all for the messages."""
    config = layout(pp=4, dp=2, microbatches=8, model=WIDE)
    of, sizes = estimator(config), parallel_sizes(config)
    whole, ranks = of.simulated(config, sizes), of.simulated_ranks(config, sizes)
    assert [sum(rank.values()) for rank in ranks] == pytest.approx([whole.seconds] * 4)
    assert ranks[3] == pytest.approx(dict(whole.components))
    assert all(rank["pipeline bubble"] > 1.1 * ranks[3]["pipeline bubble"] for rank in ranks[:3])
    assert all(rank["compute"] < ranks[3]["compute"] for rank in ranks[:3])
    instant = simulate(schedules.of_step(config, sizes), replace(of.costs(config, sizes), transfer=0.0)).span
    assert whole.components["transfers"] > 0
    rest = whole.seconds - whole.components["transfers"] - whole.components["dp"] - whole.components["optimizer"]
    assert rest == pytest.approx(instant)


def test_costs_have_the_head_on_the_last_stage() -> None:
    config = layout(pp=4, model=WIDE)
    costs = estimator(config).costs(config, parallel_sizes(config))
    assert costs.forward[3] > costs.forward[2] == costs.forward[1]
    assert costs.input_grad[1] > costs.forward[1] > 0 and costs.transfer > 0


def test_what_makes_a_step_longer() -> None:
    base = step(layout(tp=4, pp=2, sp=True, model=WIDE)).seconds
    assert step(layout(tp=4, pp=2, sp=True, model=WIDE, recompute={"granularity": "full"})).seconds > 1.2 * base
    zero_bubble = layout(tp=4, pp=2, sp=True, model=WIDE, schedule="zb_h1")
    assert (
        step(zero_bubble).components["pipeline bubble"]
        < step(layout(tp=4, pp=2, sp=True, model=WIDE)).components["pipeline bubble"]
    )
    assert step(layout(tp=4, pp=2, sp=True, model=WIDE), replace(OURS, tp_backward_overlap=False)).seconds > base
    assert step(layout(tp=4, pp=2, sp=True, model=WIDE), replace(OURS, exposed_transfers=True)).seconds > base


def test_what_software_moves_more_makes_a_step_longer() -> None:
    """Rotation in float, keys copied per query head, elementwise results made again."""
    config = layout(model={**WIDE, "num_kv_heads": 8}, recompute={"granularity": "selective"})
    base = step(config, replace(OURS, selective_products=0.001)).components
    assert step(config, replace(OURS, selective_products=0.001, rotations=10)).seconds > sum(base.values())
    assert step(config, replace(OURS, selective_products=0.001, repeats_kv=True)).seconds > sum(base.values())
    assert base["recompute"] > 0.02 * base["compute"], "though hardly a product is made again"
    alike = layout(model=WIDE)
    assert step(alike, replace(OURS, repeats_kv=True)).seconds == step(alike).seconds, (
        "each query head has its own keys"
    )


def test_a_slow_network_is_exposed() -> None:
    config = layout(tp=2, dp=8, microbatches=1, model=WIDE)
    fast = cluster_of("16xH100")
    slow = replace(fast, network_gb_per_s=1.0)
    times = [estimator(config, cluster=cluster).closed_form(config, parallel_sizes(config)) for cluster in (fast, slow)]
    assert times[1].components["dp"] > 10 * times[0].components["dp"]
    assert times[1].components["compute"] == times[0].components["compute"]


def test_uneven_stages_are_as_slow_as_the_slowest() -> None:
    model = {**WIDE, "vocab_size": 128}
    uneven = layout(pp=2, microbatches=16, model=model, parallel={"layers_per_stage": [6, 2]})
    assert (
        step(uneven).components["compute"]
        > 1.4 * step(layout(pp=2, microbatches=16, model=model)).components["compute"]
    )


def test_attention_within_documents_is_faster() -> None:
    config = layout(model=WIDE)
    documents = DocumentStatistics(4096, (((512,) * 8,),))
    of, sizes = estimator(config), parallel_sizes(config)
    assert of.closed_form(config, sizes, documents).seconds < of.closed_form(config, sizes).seconds


def test_eight_products_more_cost_an_h100_what_its_table_says() -> None:
    """A layer more: 6 FLOPs per weight and token at 500 to 760 TFLOP/s, and something for the rest."""
    times = [step(layout(microbatches=1, model={**WIDE, "num_layers": layers})) for layers in (8, 16)]
    flops = 6 * 8 * 12 * 4096**2 * 2 * 4096
    rate = flops / (times[1].components["compute"] - times[0].components["compute"]) * 1e-12
    assert 450 < rate < 700


ROW = re.compile(r"(?:layers\.\d+|rest), (forward|backward)(?: 1)? +(\d+) .* (\d+)")
"""Calls in a step's last microbatch: all of them, and NCCL's."""

SENDS = {"mixtral_ep8_all_to_all": 2 * 6 * 15}
"""Rows travel 6 times in each of two layers: one call of the host has 16 of NCCL's sends and receives."""


@pytest.mark.parametrize(
    "name", ["gemma", "llama_tp1", "llama_tp8", "mixtral_ep8_all_gather", "mixtral_ep8_all_to_all"]
)
def test_calls_of_a_microbatch_are_those_of_a_cards_program(name: str) -> None:
    first, *lines = (ROOT / "tests/cuda_stub/golden" / f"{name}.txt").read_text().splitlines()
    path, size, words = re.fullmatch(r"(\S+), rank 0 of (\d+), (.*)", first).groups()  # type: ignore[union-attr]
    config = load_config(ROOT / path, words.split(), {}, world_size=int(size))
    counted = sum(int(row[2]) for row in map(ROW.match, lines) if row) - SENDS.get(name, 0)
    assert step(config).calls == pytest.approx(counted, rel=0.12)


def test_a_step_is_host_bound_if_its_calls_outlast_the_devices_work() -> None:
    """Nothing is lost while the device is slower; else the step takes the calls' time, and the update's."""
    config = layout(microbatches=4, model={**WIDE, "num_layers": 8})
    device, sizes = load_device("H100-SXM-80GB"), parallel_sizes(config)

    def found(host_us: float) -> StepTime:
        return Estimator(cluster_of("1xH100"), device=replace(device, host_us=host_us)).closed_form(config, sizes)

    ahead, behind = found(0.0), found(1e4)
    assert ahead.components["host"] == 0 and found(1.0) == ahead
    assert behind.seconds == pytest.approx(4 * behind.calls * 1e-2 + behind.components["optimizer"], rel=1e-3)


@pytest.mark.parametrize(("dp", "posted"), [(1, 0), (2, 1)])
def test_with_graphs_the_host_posts_the_calls_of_one_microbatch_at_most(dp: int, posted: int) -> None:
    """The first, where weights are gathered under its forward; it has no graph."""
    config = layout(dp=dp, microbatches=4, model={**WIDE, "num_layers": 8})
    device = replace(load_device("H100-SXM-80GB"), host_us=1e4)
    estimator, sizes = Estimator(cluster_of(f"{dp}xH100"), device=device), parallel_sizes(config)
    eager, graphs = (
        estimator.closed_form(with_value(config, "kernels.graphs", choice), sizes).components["host"]
        for choice in ("off", "on")
    )
    assert eager > 0 and graphs == pytest.approx(posted * eager / 4)


def test_an_update_whose_state_is_in_host_memory_is_as_long_as_its_copies() -> None:
    config = layout(tp=2, pp=2, dp=2, model={**WIDE, "num_layers": 16})
    state, updated = 12 * num_parameters(config.model) / 8, step(config).components["optimizer"]
    device = load_device("H100-SXM-80GB")
    found = step(with_value(config, "optimizer.offload", "cpu")).components["optimizer"]
    copies = state / (device.host_gb_per_s * 1e9)
    # Norms are on every tp rank, the tied embedding on both stages, and two pieces' copies are exposed.
    assert updated < copies < found < 1.2 * copies
