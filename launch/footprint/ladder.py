"""The ZeRO ladder: a run's predicted memory and step time in each ZeRO stage.

rung (a ZeRO stage's settings)  ->  the config's rules, which may refuse them
                                ->  memory (models/predict/rank_memory.py)  ->  seconds (models/predict/step_time)
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rich.markup import escape
from rich.table import Table

from triaxis.engine.config.quantities.extension_costs import Measure, as_ours, with_costs
from triaxis.engine.config.quantities.plan import parallel_sizes, rank_grid
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.telemetry.outlets.format import gigabytes, significant
from triaxis.launch.pictures.tables import terminal_table
from triaxis.models.predict.changes import Changes
from triaxis.models.predict.fit import uses_nccl
from triaxis.models.predict.rank_memory import GB, KINDS, Memory, predict
from triaxis.models.predict.step_time.cluster import GPUS_PER_NODE, Cluster, cluster_of, devices_with_links
from triaxis.models.predict.step_time.estimate import Estimator

RUNGS: Mapping[str, Changes] = {
    "1": (("parallel.zero", 1), ("optimizer.offload", "none")),
    "2": (("parallel.zero", 2), ("optimizer.offload", "none")),
    "2 + offload": (("parallel.zero", 2), ("optimizer.offload", "cpu")),
    "3": (("parallel.zero", 3), ("optimizer.offload", "none")),
    "3 + offload": (("parallel.zero", 3), ("optimizer.offload", "cpu")),
}
"""Each row's name, and the fields that it sets."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One ZeRO stage, with or without offload, and its predicted memory and step time.

    Attributes:
        name: the stage's name in `RUNGS`.
        changes: configuration fields that the stage sets, and their values.
        memory: predicted memory of the fullest rank; None: the configuration's rules or the prediction refuse the stage.
        seconds: predicted seconds per step; None: unknown.
        problem: why memory or seconds are missing; "": both are known.
    """

    name: str
    changes: Changes
    memory: Memory | None = None
    seconds: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Ladder:
    """One run's predictions for all ZeRO stages, on a cluster of the run's size."""

    cluster: Cluster
    device_bytes: int
    rungs: Sequence[Rung]

    def as_json(self) -> dict[str, object]:
        """Convert to JSON: memory in bytes, seconds per step."""
        rows = [
            {
                "stage": rung.name,
                "changes": dict(rung.changes),
                "memory_bytes": rung.memory and asdict(rung.memory) | {"total": rung.memory.total},
                "host_bytes_per_node": rung.memory and self._on_node(rung.memory),
                "seconds": rung.seconds,
                "fits": rung.memory and rung.memory.total <= self.device_bytes,
                "problem": rung.problem or None,
            }
            for rung in self.rungs
        ]
        return {"device": self.cluster.device, "device_bytes": self.device_bytes, "ladder": rows}

    def _on_node(self, memory: Memory) -> int:
        """Compute a node's host memory in bytes, if each rank uses as much as the fullest."""
        return memory.host * self.cluster.gpus_per_node

    def table(self) -> Table:
        """Build a table with a row for each rung. Kinds of memory that no rung uses have no column."""
        held = [rung.memory for rung in self.rungs if rung.memory is not None]
        kinds = [kind for kind in KINDS if any(getattr(each, kind) for each in held)]
        title = f"ZeRO stages: memory of the fullest rank, of {gigabytes(self.device_bytes)}, and a step, as predicted"
        columns = ("zero", *kinds, "total", "host/node", "s/step", "fits")
        table = terminal_table(*columns, names=("zero", "fits"), title=title)
        for rung in self.rungs:
            memory, seconds = rung.memory, "unknown" if rung.seconds is None else significant(rung.seconds)
            if memory is None:
                table.add_row(rung.name, *[""] * (len(kinds) + 3), escape(f"refused: {rung.problem}"))
                continue
            free = self.device_bytes - memory.total
            fits = f"yes, {gigabytes(free)} free" if free >= 0 else f"no, {gigabytes(-free)} short"
            numbers = [gigabytes(getattr(memory, name)) for name in (*kinds, "total")]
            numbers.append(gigabytes(self._on_node(memory)) if memory.host else "")
            table.add_row(rung.name, *numbers, seconds, fits)
        return table

    @property
    def notes(self) -> list[str]:
        """Reasons why ZeRO stages with predicted memory have no predicted step time, each once."""
        unknown = [rung.problem for rung in self.rungs if rung.memory and rung.problem]
        return list(dict.fromkeys(f"seconds are unknown: {problem}" for problem in unknown))


def ladder(config: Config, device: str, *, rungs: Mapping[str, Changes] = RUNGS, measure: Measure = as_ours) -> Ladder:
    """Predict a run's memory and step time for each rung (ZeRO stage).

    Args:
        config: run with `parallel.dp` set. Nodes have `runtime.ranks_per_node` devices, or 8 if that is null.
        device: kind of the run's devices, such as H100 (`cluster_of`).
        rungs: fields to set for each row, by row name.
        measure: function that measures an extension's costs in a layout.

    Raises:
        ConfigError: the device's links or rates are not known.
    """
    grid = rank_grid(config, parallel_sizes(config), GPUS_PER_NODE)
    try:
        one = cluster_of(f"1x{device}")
    except ConfigError as error:
        known = ", ".join(devices_with_links())
        problem = f"{device} is no GPU with known links and rates, so no step could be timed. Give one of {known}."
        raise ConfigError([problem], "--gpu-kind") from error
    cluster = replace(one, nodes=grid.num_nodes, gpus_per_node=grid.ranks_per_node)
    estimator = Estimator(cluster)
    rows = [_rung(config, name, changes, estimator, measure) for name, changes in rungs.items()]
    return Ladder(cluster, round(estimator.device.memory_gb * GB), rows)


def _rung(config: Config, name: str, changes: Changes, estimator: Estimator, measure: Measure) -> Rung:
    for key, value in changes:
        config = with_value(config, key, value)
    sizes, cluster = parallel_sizes(config), estimator.cluster
    if broken := problems(config, sizes.world_size, cluster.gpus_per_node):
        return Rung(name, changes, problem=" ".join(broken))
    config = with_costs(config, measure(config, sizes))
    try:
        memory = predict(config, sizes, nccl=uses_nccl(config)).fullest
    except ConfigError as error:
        return Rung(name, changes, problem=" ".join(error.problems))
    try:
        return Rung(name, changes, memory, estimator.simulated(config, sizes).seconds)
    except ConfigError as error:
        return Rung(name, changes, memory, problem=" ".join(error.problems))
