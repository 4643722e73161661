"""Train a config for a few steps in several layouts, and read the results.

    config, overrides, layout          ->  a config of its own: random tokens, a few steps, no checkpoint
                                           |  launch/start/launcher.py starts the ranks, one layout at a time
                                           v
    runs/<layout>/metrics.jsonl,       ->  LayoutResult, or Failed with the reason
    runs/<layout>/events.jsonl

A layout that is illegal, or fails while it trains, as without enough memory, becomes a `Failed`. The next layout is tried. More
ranks than GPUs raise `TooFewGpusError`.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.run_phases import as_a_run
from triaxis.engine.config.schema.training import CONSTANT_RATE
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError, ExitCode, TriaxisError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.telemetry.record.events import read_events
from triaxis.engine.telemetry.record.jsonl import read_records
from triaxis.engine.telemetry.timing.time_split import PARTS
from triaxis.launch.start.launcher import LaunchPlan, Request, launch, make_plan
from triaxis.launch.start.process.failure import AFTER
from triaxis.launch.start.world import TooFewGpusError
from triaxis.launch.tuning.layer_costs import LayerCosts, Pass, measured_costs, predicted_costs
from triaxis.launch.verify.run import without_layout_variables
from triaxis.models.predict.rank_memory import predicted_memory
from triaxis.models.predict.step_time.cluster import cluster_of_devices

LEAST_STEPS = 3
"""Fewest steps: the first warms up and the last step's line has no split of that step, so three steps leave one split step."""

WARM_UP_SHARE = 4
"""The first 1 / WARM_UP_SHARE of the steps, at least one, is excluded from the speeds."""

STOPPED = frozenset({*AFTER.values(), 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP})
"""Exit codes for a run that was stopped from outside: no further layout is tried."""

_ERROR = re.compile(r"^\s*(?:\| )?\s*(?:error: |torch\.\w*OutOfMemoryError: )(.+)$", re.MULTILINE)
_LAST_LINES = 15


@dataclass(frozen=True, slots=True)
class FullestRank:
    """The rank that held the most memory.

    Attributes:
        rank: index of the rank.
        measured: measured peak in bytes, allocated by torch on a GPU or resident on a CPU.
        predicted: predicted bytes for this rank's parameters, gradients, optimizer state and activations.
    """

    rank: int
    measured: int
    predicted: int


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """Costs of the mean layer of rank 0 on a microbatch.

    Attributes:
        measured: costs by pass; None: CUDA graphs were replayed, and no layer was called.
        predicted: costs of all passes; None: no rates of the device or the dtype are known.
    """

    measured: Mapping[Pass, LayerCosts] | None
    predicted: LayerCosts | None


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """Results for a layout that was trained.

    Attributes:
        layout: layout sizes in words.
        device: description of the device ("8 ranks on 1 node, NVIDIA H200, nccl").
        is_gpu: whether the device is a GPU.
        first_step, last_step: first and last step, counted from 1, of the steps whose median is reported.
        tokens_per_second: tokens per second over all ranks, in the median step.
        model_tflops: model TFLOP/s per rank, recomputation not counted, in the median step.
        mfu: model FLOPs utilization, 0 to 1; None if no peak is known.
        memory: memory of the rank that held most.
        time: share of the step time by part (`PARTS`), over all ranks, in the run's last time split; they add up to 1.
        loss: last step's loss, nats per token.
        layer: costs of a layer in a further step that was traced; None: no step was.
    """

    config: Config
    layout: str
    num_ranks: int
    device: str
    is_gpu: bool
    first_step: int
    last_step: int
    step_seconds: float
    tokens_per_second: float
    model_tflops: float
    mfu: float | None
    memory: FullestRank
    time: Mapping[str, float]
    loss: float
    layer: LayerProfile | None = None

    @property
    def tokens_per_second_per_rank(self) -> float:
        return self.tokens_per_second / self.num_ranks


@dataclass(frozen=True, slots=True)
class Failed:
    """A layout that was not trained.

    Attributes:
        layout: layout as requested.
        reason: why the layout was not trained, in one or several lines.
        exit_code: exit code of the run, or of the error that kept the run from starting.
        output: last lines of the run's output; "" if the run was not started.
    """

    layout: str
    reason: str
    exit_code: int
    output: str = ""


def rank_outcomes(outcomes: Sequence[LayoutResult | Failed]) -> tuple[list[LayoutResult], list[Failed]]:
    """Split the outcomes into trained layouts and failed ones.

    Trained layouts are sorted by tokens per second per rank, fastest first. Failed ones keep the given order.
    """
    measured = [one for one in outcomes if isinstance(one, LayoutResult)]
    measured.sort(key=lambda one: -one.tokens_per_second_per_rank)
    return measured, [one for one in outcomes if isinstance(one, Failed)]


def write_config(
    path: Path,
    overrides: Sequence[str],
    num_steps: int,
    folder: Path,
    name: str,
    variables: Mapping[str, str],
    *,
    profiles: bool = False,
) -> Path:
    """Write the config for a short run, and return its path.

    Args:
        path, overrides, variables: arguments to `load_config`; the overrides include the layout.
        num_steps: number of steps to train.
        folder: folder for the config and the run directory.
        name: the run's name.
        profiles: whether rank 0 traces a further step.

    Raises:
        ConfigError: all problems of the configuration at once.
    """
    asked = load_config(path, overrides, variables)
    tree = asked.model_dump(mode="json")
    tree["data"] = {"synthetic": True}
    as_a_run(tree, num_steps + profiles)
    tree["optimizer"] |= CONSTANT_RATE
    # One line at the end, whose split covers all steps but the first. A traced step is slow, and has a line of its own.
    tree["telemetry"] = {"log_interval": num_steps, "peak_tflops": asked.telemetry.peak_tflops}
    if profiles:
        tree["telemetry"]["profile"] = {"start": num_steps + 1, "steps": 1}
    tree["checkpoint"] = {"interval": "never"}
    tree["runtime"] |= {"runs_dir": str(folder), "name": name}
    written = folder / f"{name}.yaml"
    written.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return written


def try_layout(config_path: Path, label: str, log: Path) -> LayoutResult | Failed:
    """Train the config that `write_config` wrote, on the ranks that training would use.

    The result is a `Failed` if the run's exit code is not 0, or if any error except `TooFewGpusError` prevents its start.

    Args:
        config_path: path that `write_config` returned.
        label: layout as requested.
        log: file for the run's output.

    Raises:
        TooFewGpusError: the layout has more ranks than this machine has GPUs.
    """
    request = Request(config_path, (), explained_codes=(ExitCode.DIVERGED,))
    with without_layout_variables():
        try:
            plan = make_plan(request, os.environ)
            with _output_to(log):
                exit_code = launch(request, os.environ)
        except TooFewGpusError:
            raise
        except TriaxisError as error:
            return refused(label, error)
    if exit_code:
        output = log.read_text(errors="replace")
        return Failed(label, reason_of(output, exit_code), exit_code, "\n".join(output.splitlines()[-_LAST_LINES:]))
    return read_measured(plan)


def refused(label: str, error: TriaxisError) -> Failed:
    """Build the outcome of a layout that was not started because of `error`."""
    problems = error.problems if isinstance(error, ConfigError) else (str(error),)
    return Failed(label, "\n".join(problems), error.exit_code)


def show_plan(config_path: Path) -> None:
    """Print how a layout would be started, and start nothing.

    Raises:
        TriaxisError: the layout cannot be started.
    """
    with without_layout_variables():
        launch(Request(config_path, (), dry_run=True), os.environ)


def read_measured(plan: LaunchPlan) -> LayoutResult:
    """Read a successful run's step lines and events, and compute its `LayoutResult`."""
    config, name = plan.config, plan.config.runtime.name
    assert name is not None, "write_config gives it one"
    directory = RunDirectory.join(config.runtime.runs_dir, name, 0)
    steps, profile = read_records(directory.metrics).records, config.telemetry.profile
    if profile is not None:
        steps = [step for step in steps if step["step"] < profile.start]
    details = {event.kind: event.details for event in read_events(directory.path).events}
    started = details["attempt_started"]["layout"]
    first = 1 + max(1, len(steps) // WARM_UP_SHARE)
    steady = [step for step in steps if step["step"] >= first]
    middle = {
        key: median(step[key] for step in steady)
        for key in ("step_time_seconds", "tokens_per_second", "model_tflops_per_device")
    }
    last, split = steps[-1], steps[-1]["time_split"]
    mfus = [step["mfu"] for step in steady if step["mfu"] is not None]
    return LayoutResult(
        config=config,
        layout=str(plan.sizes),
        num_ranks=plan.sizes.world_size,
        device=started["backend"],
        is_gpu=started["device"] != "cpu",
        first_step=first,
        last_step=last["step"],
        step_seconds=middle["step_time_seconds"],
        tokens_per_second=middle["tokens_per_second"],
        model_tflops=middle["model_tflops_per_device"],
        mfu=median(mfus) if mfus else None,
        memory=_memory(config, plan.sizes, details["finished"]["peak_memory_bytes"]),
        time={part: split[f"{part}_seconds"] / split["step_seconds"] for part in PARTS},
        loss=last["loss"],
        layer=None if profile is None else _profiled(plan, directory.profile(0, profile), started),
    )


def _profiled(plan: LaunchPlan, trace: Path, started: Mapping[str, Any]) -> LayerProfile:
    nodes = started["nodes"]
    cluster = cluster_of_devices(started["device"], nodes, -(-plan.sizes.world_size // nodes))
    return LayerProfile(measured_costs(trace), predicted_costs(plan.config, plan.sizes, cluster))


def _memory(config: Config, sizes: ParallelSizes, peaks: Sequence[int]) -> FullestRank:
    rank = max(range(len(peaks)), key=lambda one: peaks[one])
    grid = RankGrid(sizes, allow_tp_across_nodes=True)
    predicted = predicted_memory(config, sizes, grid.coordinates(rank).pp)
    # The measured number is what torch has allocated, which excludes NCCL's buffers.
    return FullestRank(rank, peaks[rank], predicted.tensors)


def reason_of(output: str, exit_code: int) -> str:
    """Return why a run failed.

    The reason is the first error in the output. Without an error, it is the exit code and the last line that the run printed.
    """
    if (error := _ERROR.search(output)) is not None:
        return error[1].strip()
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"exit code {exit_code}" + (f": {lines[-1]}" if lines else "")


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Redirect output from this process and its children to a file."""
    kept = os.dup(1), os.dup(2)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        with path.open("w") as file, redirect_stdout(file), redirect_stderr(file):
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
    finally:
        for descriptor, copy in enumerate(kept, start=1):
            os.dup2(copy, descriptor)
            os.close(copy)
