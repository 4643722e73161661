"""Shows predicted and measured seconds per step side by side, by component.

The prediction is the mean over pipeline ranks. The measurement is the mean over the last attempt's time splits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from statistics import fmean
from typing import Any

from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError, TriaxisError, counted
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.telemetry.timing.time_split import PARTS, Part
from triaxis.launch.pictures.charts import bar_chart, one_bar
from triaxis.launch.pictures.document import html_table
from triaxis.launch.pictures.sections import seconds_text
from triaxis.launch.report.parts import MISSING, PART_NAMES, sizes_of
from triaxis.launch.report.record import RunRecord, attempt_of, number
from triaxis.models.predict.step_time.cluster import Cluster, cluster_of_devices
from triaxis.models.predict.step_time.estimate import Estimator

COMPONENTS_OF: Mapping[Part, tuple[str, ...]] = {
    "compute": ("compute", "recompute", "host"),
    "exposed_tp": ("tp",),
    "exposed_cp": ("cp",),
    "exposed_ep": ("experts",),
    "host_read": (),
    "bubble": ("pipeline bubble",),
    "exposed_pp": ("transfers",),
    "exposed_dp": ("dp",),
    "optimizer": ("optimizer",),
    "data": (),
    "checkpoint": (),
    "other": (),
}
"""Components of the predicted `StepTime` that correspond to each measured part; empty: the part is not predicted."""

NAME_IT = (
    "Name the cluster with `triaxis report --cluster` (a file, or 64xH100); `triaxis bench --device` measures a device."
)


def predicted_beside_measured(run: RunRecord, cluster: Cluster | None) -> str:
    """Render the predicted and measured seconds of a step as HTML, or note what is missing.

    Args:
        run: run whose last attempt with time splits is shown.
        cluster: cluster that the run used; None: the recorded devices with their usual links.

    Raises:
        ConfigError: `cluster` has fewer devices than the run has ranks, or no rate for the run's dtype.
    """
    sizes, measured = sizes_of(run), _measured(run)
    if run.config is None or sizes is None:
        return MISSING.format("No prediction without a configuration of this version and the number of ranks.")
    if measured is None:
        return MISSING.format("No step of this run has a time split (telemetry.time_split), so nothing is compared.")
    found = cluster or _recorded_cluster(run)
    if not isinstance(found, Cluster):
        return MISSING.format(escape(f"{found} {NAME_IT}"))
    try:
        predicted = _predicted(run.config, sizes, found)
    except TriaxisError as error:
        if cluster is not None:
            raise
        return MISSING.format(escape(f"{error} {NAME_IT}"))
    return _said(run.config, found, is_given=cluster is not None) + _drawn(predicted, measured)


def _recorded_cluster(run: RunRecord) -> Cluster | str:
    """Build a cluster from the recorded devices and their usual links. If that is impossible, return the reason."""
    device, world_size, nodes = (run.layout.get(name) for name in ("device", "world_size", "nodes"))
    if not isinstance(device, str):
        return "The run recorded no device."
    if device == "cpu":
        return "No rates of this CPU are known."
    if "gloo" in str(run.layout.get("backend", "")):
        return "Ranks communicated through the host, and its link rates are unknown."
    if not isinstance(world_size, int) or not isinstance(nodes, int) or nodes < 1 or world_size % nodes:
        return "The run recorded no nodes."
    cluster = cluster_of_devices(device, nodes, world_size // nodes)
    return f"No rates of {device} are known." if cluster is None else cluster


def _predicted(config: Config, sizes: ParallelSizes, cluster: Cluster) -> dict[Part, float | None]:
    """Predict each part's seconds per step, as the mean over pipeline ranks. Unpredicted parts are None."""
    if sizes.world_size > cluster.num_gpus:
        raise ConfigError(
            [
                f"--cluster has {counted(cluster.num_gpus, 'device')}, but the run has {sizes.world_size} ranks. Some "
                "ranks would have no device. Name the cluster that the run used."
            ]
        )
    cluster = replace(cluster, gpus_per_node=min(cluster.gpus_per_node, sizes.world_size))
    ranks = Estimator(cluster).simulated_ranks(config, sizes)
    means = {name: fmean(rank.get(name, 0.0) for rank in ranks) for rank in ranks for name in rank}
    return {
        part: sum(means.get(name, 0.0) for name in components) if components else None
        for part, components in COMPONENTS_OF.items()
    }


def _measured(run: RunRecord) -> dict[Part, float] | None:
    """Compute each part's mean seconds per step in the last attempt with time splits.

    None if no attempt has any. The attempt's first time split includes start-up and compilation. This split is used only if
    there is no other.
    """
    split = [each for each in run.steps if number(each, "time_split", "step_seconds") > 0]
    if not split:
        return None
    last = max(attempt_of(each) for each in split)
    own = [each for each in split if attempt_of(each) == last]
    return {part: _mean(own[1:] or own, f"{part}_seconds") for part in PARTS}


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float:
    known = [value for each in records if (value := number(each, "time_split", key)) == value]
    return fmean(known) if known else 0.0


def _said(config: Config, cluster: Cluster, *, is_given: bool) -> str:
    where = f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.load_device().name}"
    links = "" if is_given else ", with the usual links of such nodes"
    said = f"Per step, means over ranks. Predicted for {where}{links}. Measured: the last attempt, without its first steps."
    if config.data.attention == "within":
        said += " Predicted as if tokens attended across documents, which takes longer."
    return f'<p class="soft">{escape(said)}</p>'


def _drawn(predicted: Mapping[Part, float | None], measured: Mapping[Part, float]) -> str:
    shown = [part for part in PARTS if measured[part] > 0 or (predicted[part] or 0) > 0]
    bars = []
    for part in shown:
        known = [("c0", "measured", measured[part]), ("c1", "predicted", predicted[part])]
        own = [one_bar(style, what, seconds, seconds_text) for style, what, seconds in known if seconds is not None]
        bars.append((part.removeprefix("exposed_"), own))
    rows = [_row(PART_NAMES[part], predicted[part], measured[part], COMPONENTS_OF[part]) for part in shown]
    whole = sum(seconds for seconds in predicted.values() if seconds is not None)
    rows.append(_row("step", whole, sum(measured.values()), ()))
    numbers = ((name, "n") for name in ("predicted", "measured", "predicted / measured - 1"))
    columns = (("part", ""), *numbers, ("components of the prediction", "soft"))
    return bar_chart("predicted and measured seconds of a step", bars) + html_table(columns, rows)


def _row(name: str, predicted: float | None, measured: float, components: Sequence[str]) -> tuple[str, ...]:
    off = f"{predicted / measured - 1:+.1%}" if predicted is not None and measured > 0 else ""
    seconds = "not predicted" if predicted is None else seconds_text(predicted)
    return escape(name), seconds, seconds_text(measured), off, escape(", ".join(components))
