"""Costs of a layer from a trace: which launches and times count, and where."""

import gzip
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from tests.engine.telemetry.trace.test_profile import trace_a_step
from tests.harness import run_ranks
from tests.models.predict.step_time.layouts import layout
from tests.parity.cases import Case
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.telemetry.trace.layer_ranges import LAYER
from triaxis.launch.tuning.layer_costs import LayerCosts, measured_costs, predicted_costs
from triaxis.models.predict.step_time.cluster import cluster_of

MAIN, AUTOGRAD = 1, 2
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_")


def event(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, number: int = 0) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": {"correlation": number}}


def named(name: str, ts: float, dur: float, tid: int = MAIN) -> dict[str, Any]:
    return event("user_annotation", name, ts, dur, tid)


RANGES = [
    *(named("forward_backward", 0, 900), named("0F0", 0, 100), named("layers.0", 10, 30), named("layers.1", 50, 40)),
    # A forward that is recomputed, and one inside of a backward.
    *(named("0I0", 200, 300), named("layers.1", 210, 20, AUTOGRAD), named("layers.1", 240, 100, AUTOGRAD)),
    *(named("layers.0", 350, 60, AUTOGRAD), named("layers.0", 360, 20, AUTOGRAD)),
    named("0W0", 600, 80),
]
LAUNCHES = [
    # Of the embedding, of layers, of the head.
    *((5, MAIN, 7.0), (15, MAIN, 100.0), (55, MAIN, 200.0), (95, MAIN, 9.0)),
    *((205, AUTOGRAD, 9.0), (215, AUTOGRAD, 200.0), (250, AUTOGRAD, 400.0), (365, AUTOGRAD, 100.0)),
    # Of this thread while autograd's runs a layer; of deferred weight gradients; of the optimizer.
    *((260, MAIN, 5.0), (610, MAIN, 50.0), (950, MAIN, 1000.0)),
]


def begins_in(event: dict[str, Any], span: dict[str, Any]) -> bool:
    return bool(span["ts"] <= event["ts"] < span["ts"] + span["dur"])


def written(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_bytes(
        gzip.compress(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}).encode())
    )
    return path


def test_of_a_gpu_calls_count_where_they_are_launched(tmp_path: Path) -> None:
    launched = [
        each
        for number, (ts, thread, device_us) in enumerate(LAUNCHES, start=1)
        for each in (
            event("cuda_runtime", "cudaLaunchKernel", ts, 2, thread, number),
            event("kernel", "gemm", ts + 1000, device_us, 7, number),
        )
    ]
    # A wait has no kernel, and what an operator does besides is no call.
    others = [event("cuda_runtime", "cudaStreamWaitEvent", 16, 1, MAIN, 99), event("cpu_op", "aten::mm", 14, 5)]
    found = measured_costs(written(tmp_path / "trace.json.gz", [*RANGES, *launched, *others]))
    assert found == {
        "forward": LayerCosts(2 / 2, (30 + 40) / 2, 300 / 2),
        "backward": LayerCosts(4 / 2, (20 + 100 + 60 + 80) / 2, 750 / 2),
    }


def test_of_a_cpu_operators_within_no_other_count(tmp_path: Path) -> None:
    operators = [
        # An autograd function of ours, in it a product, in which torch calls others.
        *(event("cpu_op", "_ColumnParallel", 11, 27), event("cpu_op", "aten::mm", 12, 20)),
        *(event("cpu_op", "aten::resolve_conj", 12, 1), event("cpu_op", "aten::gelu", 60, 4)),
    ]
    found = measured_costs(written(tmp_path / "trace.json.gz", [*RANGES, *operators]))
    assert found is not None and found["forward"] == LayerCosts(1, 35, 24 / 2)


@pytest.mark.distributed
def test_the_products_of_a_real_step_are_in_the_costs(tmp_path: Path) -> None:
    """In a trace that has no operators but products, and what torch calls in them."""
    run_ranks(trace_a_step, 1, Case("gpt", num_layers=3, global_batch_size=2), str(tmp_path))
    events = json.loads(gzip.decompress((tmp_path / "0.json.gz").read_bytes()))["traceEvents"]
    products = [each for each in events if each["name"] in PRODUCTS]
    kept = [
        each
        for each in events
        if each.get("cat") == "user_annotation"
        or (each.get("cat") == "cpu_op" and any(begins_in(each, one) for one in products))
    ]
    layers = [each for each in kept if LAYER.fullmatch(each["name"])]
    inside = [one["dur"] for one in products if any(begins_in(one, layer) for layer in layers)]
    found = measured_costs(written(tmp_path / "kept.json.gz", kept))
    assert found is not None and len(inside) >= 2 * 3 * 4 * 3
    both = found["forward"] + found["backward"]
    assert 2 * 3 * both.calls == pytest.approx(len(inside))
    assert 2 * 3 * both.device_us == pytest.approx(sum(inside))


def test_where_graphs_are_replayed_no_layer_is_called(tmp_path: Path) -> None:
    assert measured_costs(written(tmp_path / "trace.json.gz", [named("0F0", 0, 100)])) is None


def test_the_prediction_is_that_of_a_step_without_its_ends() -> None:
    """Two depths differ by layers; without rates, there is no prediction."""
    cluster = cluster_of("8xH100")
    configs = [layout(microbatches=4, model={"num_layers": layers}) for layers in (8, 16)]
    found = [predicted_costs(config, parallel_sizes(config), cluster) for config in configs]
    assert found[0] is not None and found[1] is not None and astuple(found[0]) == pytest.approx(astuple(found[1]))
    assert found[0].host_us == found[0].calls * cluster.load_device().host_us
    fp32 = with_value(configs[0], "precision.dtype", "fp32")
    assert predicted_costs(fp32, parallel_sizes(fp32), cluster) is None
    assert predicted_costs(configs[0], parallel_sizes(configs[0]), None) is None
