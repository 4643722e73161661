"""The cost model's experts: its products are those of telemetry, its wires those of the traffic formula."""

from typing import Any

import pytest

from tests.models.predict.step_time.layouts import layout
from triaxis.engine.config.quantities.plan import batch_plan, parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import Coordinates
from triaxis.engine.telemetry.record.flops import hardware_flops_per_token
from triaxis.models.predict.step_time.cluster import cluster_of
from triaxis.models.predict.step_time.estimate import Estimator
from triaxis.models.predict.step_time.experts import expert_work
from triaxis.models.predict.step_time.facts import head_gemm, layer_work, parameters_of_layer
from triaxis.models.predict.step_time.implementation import OURS
from triaxis.models.predict.terms import recomputed_layers
from triaxis.models.predict.traffic import expected_traffic

EXPERTS = {"num_experts": 16, "top_k": 4, "ffn_hidden_size": 64, "shared_experts": 1}


def with_experts(
    dispatch: str = "auto", moe: dict[str, Any] = EXPERTS, layers: list[str] | None = None, **choices: Any
) -> Config:
    cut = {name: choices.pop(name) for name in ("ep", "etp") if name in choices}
    model = {"layers": layers or ["dense", "moe*3"], "moe": moe, "activation": "swiglu", "bias": "none"}
    config = layout(**choices, model=model, parallel=cut)
    return config.model_copy(update={"kernels": config.kernels.model_copy(update={"dispatch": dispatch})})


LAYOUTS: list[dict[str, Any]] = [
    {"dp": 4, "ep": 4},
    {"dp": 2, "tp": 2, "ep": 4, "recompute": {"granularity": "full"}},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "sp": True, "moe": EXPERTS | {"shared_experts": 0}},
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_flops_are_those_that_telemetry_counts(case: dict[str, Any]) -> None:
    config = with_experts(**case)
    sizes = parallel_sizes(config)
    counted = 3.0 * head_gemm(config, sizes).flops
    for stage in stages_of(config):
        again = recomputed_layers(config, stage)
        for place, layer in enumerate(stage.layers):
            work = layer_work(config, sizes, OURS, layer)
            once = sum(gemm.flops for gemm in work.gemms) + work.core_flops
            if work.experts is not None:
                once += sum(each.flops for each in (work.experts.router, work.experts.up, work.experts.down))
            counted += (4 if place < again else 3) * once
    tokens = config.train.micro_batch_size * config.model.seq_length
    layers = [len(stage.layers) for stage in stages_of(config)]
    assert counted * sizes.tp == pytest.approx(
        tokens * hardware_flops_per_token(config.model, config.recompute, layers)
    )


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_wires_are_those_of_the_traffic_formula(case: dict[str, Any], dispatch: str) -> None:
    config = with_experts(dispatch, **case)
    sizes, stages = parallel_sizes(config), stages_of(config)
    flows = expected_traffic(config, sizes, Coordinates(0, 0, 0, 0), stages)
    sent = sum(volume.wire_bytes for flow, volume in flows.items() if flow.axis == "experts")
    over_tp = sum(volume.wire_bytes for flow, volume in flows.items() if flow.purpose == "tokens")
    again = 2 if config.recompute.granularity == "full" else 1
    work, passes = expert_work(config, sizes, 1.0), len(config.model.expert_layers)
    passes *= batch_plan(config, sizes.dp).num_microbatches
    assert passes * (work.forward.times(again) + work.backward).bytes == pytest.approx(sent)
    assert (over_tp > 0) == (sizes.tp > 1 and not config.parallel.sequence_parallel)
    # What is recomputed gathers its outputs once more.
    assert passes * work.cut.bytes * (1 + again) == pytest.approx(over_tp)


def test_the_slowest_ranks_load_makes_products_and_exchanges_longer() -> None:
    config = with_experts("all_to_all", dp=8, ep=8)
    sizes, cluster = parallel_sizes(config), cluster_of("8xH100")
    balanced, loaded = (
        Estimator(cluster, expert_load=load).closed_form(config, sizes).components for load in (1.0, 3.0)
    )
    assert loaded["experts"] > balanced["experts"] > 0
    assert loaded["compute"] > balanced["compute"]
    assert loaded["dp"] <= balanced["dp"], "only what is exposed, beside a longer backward"


def test_experts_of_one_rank_each_are_reduced_over_nobody() -> None:
    """With ep = dp every expert is on one rank, so its gradients are sent nowhere, and its update is the rank's own."""
    wide = with_experts(layers=["moe"], dp=8, ep=8, moe=EXPERTS | {"ffn_hidden_size": 4096, "shared_experts": 0})
    narrow = wide.model_copy(update={"parallel": wide.parallel.model_copy(update={"ep": 1})})
    cut, whole = (parameters_of_layer(config, parallel_sizes(config), 0) for config in (wide, narrow))
    assert whole.experts == 8 * cut.experts
    assert whole.all - whole.experts == cut.all - cut.experts
    cluster = cluster_of("8xH100")
    here, everywhere = (
        Estimator(cluster).closed_form(config, parallel_sizes(config)).components for config in (wide, narrow)
    )
    assert here["dp"] < everywhere["dp"]
    assert here["experts"] > everywhere["experts"] == 0
