"""Predicted seconds beside measured ones: the model's own numbers, the right steps, and a reason where there is no prediction."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from tests.launch.html_page import Page
from tests.launch.report.test_report import DEVICE, SPLIT, STEP, TREE, make_run
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.run.entries import events_file
from triaxis.engine.telemetry.outlets.format import significant
from triaxis.engine.telemetry.outlets.metrics_log import MetricsLog
from triaxis.engine.telemetry.timing.time_split import PARTS, TimeSplit
from triaxis.launch import cli
from triaxis.launch.report.page import render
from triaxis.launch.report.predicted import COMPONENTS_OF
from triaxis.launch.report.record import read_run
from triaxis.models.predict.device import device_names, load_device
from triaxis.models.predict.step_time.cluster import cluster_of, cluster_of_devices
from triaxis.models.predict.step_time.estimate import COMPONENTS, Estimator


def said(run: Path, cluster: str | None = None) -> str:
    return Page(render(read_run(run), 1.7e9, None if cluster is None else cluster_of(cluster))).sections["predicted"]


def with_layout(run: Path, **changed: object) -> Path:
    path = events_file(run, node=0)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["kind"] == "attempt_started":
            event["layout"].update(changed)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_each_part_and_each_component_has_one_place() -> None:
    assert tuple(COMPONENTS_OF) == PARTS
    assert sorted(name for names in COMPONENTS_OF.values() for name in names) == sorted(COMPONENTS)


def test_both_are_means_over_ranks_and_what_is_not_predicted_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo")
    # A first line of the log and an earlier attempt count for nothing.
    log = MetricsLog(run / "metrics.jsonl")
    seconds = {part: 0.001 * (place + 1) for place, part in enumerate(PARTS)}
    for step, factor in ((70, 1.0), (80, 3.0)):
        split = TimeSplit(step - 9, step, ({part: factor * each for part, each in seconds.items()},), (0.0,), (0.0,))
        log.record(replace(STEP, step=step, attempt=1, time_split=split))
    log.close()
    config = Config.model_validate(TREE)
    cluster = cluster_of_devices(DEVICE, 1, 4)
    assert cluster is not None
    ranks = Estimator(cluster).simulated_ranks(config, parallel_sizes(config))
    bubble = fmean(rank["pipeline bubble"] for rank in ranks)
    text = said(run)
    assert "Predicted for 1 x 4 H100-SXM-80GB, with the usual links of such nodes." in text
    # Of attempt 1 the lines of steps 50, 60, 70, 80: the first one is left out.
    measured = fmean([SPLIT.ranks[0]["bubble"], seconds["bubble"], 3 * seconds["bubble"]])
    row = f"pipeline bubble{significant(1e3 * bubble)} ms{significant(1e3 * measured)} ms{bubble / measured - 1:+.1%}"
    assert row in text
    assert "datanot predicted" in text and "checkpointnot predicted" in text and "othernot predicted" in text
    whole = sum(fmean(rank[name] for rank in ranks) for name in ranks[0])
    assert f"step{significant(1e3 * whole)} ms" in text
    assert "documents" not in text


def test_a_named_cluster_counts_more_than_the_recorded_device(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo")
    assert "Predicted for 1 x 8 A100-SXM-80GB. Measured" in said(run, "8xA100")
    with pytest.raises(ConfigError, match="--cluster has 2 devices, but the run has 4 ranks"):
        said(run, "2xH100")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": "cpu"}, "No rates of this CPU are known."),
        ({"device": "NVIDIA H100 PCIe"}, "No rates of NVIDIA H100 PCIe are known."),
        ({"device": None}, "The run recorded no device."),
        ({"backend": f"{DEVICE}, gloo through the host"}, "Ranks communicated through the host"),
        ({"nodes": None}, "The run recorded no nodes."),
    ],
)
def test_without_rates_there_is_a_reason_and_a_way(tmp_path: Path, changed: dict[str, object], reason: str) -> None:
    text = said(with_layout(make_run(tmp_path / "demo"), **changed))
    assert reason in text and "--cluster" in text and "triaxis bench --device" in text


def test_without_a_time_split_nothing_is_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo")
    (run / "metrics.jsonl").unlink()
    assert "No step of this run has a time split" in said(run)
    (run / "config.yaml").unlink()
    assert "No prediction without a configuration" in said(run)


def test_a_dtype_without_a_rate_is_a_reason_on_the_page_and_an_error_of_a_named_cluster(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo")
    text = (run / "config.yaml").read_text().replace("dtype: bf16", "dtype: fp32")
    (run / "config.yaml").write_text(text)
    assert "has no rate for fp32" in said(run)
    with pytest.raises(ConfigError, match="has no rate for fp32"):
        said(run, "8xH100")


def test_the_command_takes_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "demo")
    assert cli.main(["report", str(run), "--cluster", "8xA100"]) == 0
    assert "A100-SXM-80GB" in (run / "report.html").read_text()
    assert cli.main(["report", str(run), "--cluster", "8xNothing"]) == ConfigError.exit_code
    assert "Nothing is no device with usual links" in capsys.readouterr().err


def test_every_name_of_torch_stands_for_a_device_that_ships() -> None:
    for name in (DEVICE, "NVIDIA A100-SXM4-80GB", "NVIDIA H200"):
        cluster = cluster_of_devices(name, 2, 4)
        assert cluster is not None and cluster.device in device_names()
        assert (cluster.nodes, cluster.gpus_per_node, cluster.num_gpus) == (2, 4, 8)
        assert load_device(cluster.device).name.split("-")[0] in name
    assert cluster_of_devices("NVIDIA A100-PCIE-40GB", 1, 1) is None
