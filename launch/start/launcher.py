"""Resolve the config, choose the world and start the ranks.

    bash launch/pretrain_gpt.sh [config.yaml] [dotted=overrides] [--dry-run]
        |  config        YAML < environment < dotted
        |  world         NPROC_PER_NODE, else the GPUs, else tp cp pp dp of the config
        |  corpus        prepared first, if a tiny config finds none
        v
    one machine, or one call per node:  torchrun  ->  N x launch/pretrain_gpt.py     RANK, WORLD_SIZE, ... set by torchrun
    one task of srun per GPU:           launch/pretrain_gpt.py here, now             the same variables, from SLURM's

Each rank reads the config again from the same words and environment. When a rank dies, the others are ended.
"""

import importlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import BatchPlan, batch_plan, parallel_sizes
from triaxis.engine.config.rules.check import require_legal
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.indexed import bin_path, idx_path
from triaxis.engine.data.corpus.tokenizers import BYTES
from triaxis.engine.device.gpus import BACKEND_VARIABLE, CPU, CUDA, DEVICE_VARIABLE, NCCL, find_gpus
from triaxis.engine.device.host_memory import kernel_kills
from triaxis.engine.errors import ExitCode, TopologyError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.program import ROOT, triaxis
from triaxis.engine.run.directory import RunDirectory, run_name
from triaxis.engine.run.entries import LOGS
from triaxis.engine.telemetry.outlets.format import wrapped
from triaxis.launch.start.gpu_memory import read_devices
from triaxis.launch.start.import_path import import_variables
from triaxis.launch.start.open_files import allow_open_files
from triaxis.launch.start.other_launchers import without_other_launchers
from triaxis.launch.start.preflight import refuse_without_gpu
from triaxis.launch.start.process.ending import end, run_rank
from triaxis.launch.start.process.failure import (
    AFTER,
    OTHERS_END_SECONDS,
    RankFailure,
    describe,
    describe_hang,
    first_cause,
    last_log,
    where,
)
from triaxis.launch.start.process.forward_signals import ForwardedSignals, NoRanksError
from triaxis.launch.start.process.lasting_output import lasting_output
from triaxis.launch.start.srun_task import LOOPBACK, is_rank, rank_variables
from triaxis.launch.start.variables import DEFAULT_PORT
from triaxis.launch.start.world import World, decide
from triaxis.models.predict.fit import Devices, memory_line, memory_rule, uses_gpu
from triaxis.models.predict.rank_memory import predict
from triaxis.models.run_rules import RULES_OF_A_RUN

if TYPE_CHECKING:  # its module imports torch
    from triaxis.launch.start.rendezvous import MeetingPlace

DEFAULT_CONFIG = ROOT / "configs" / "gpt_tiny.yaml"
"""Config for a command that names none, on a machine without GPUs."""

GPU_CONFIG = DEFAULT_CONFIG.with_name("gpt_125m_bytes.yaml")
"""Config for a command that names none, on a machine with GPUs."""

STDLIB_CONFIGS = (DEFAULT_CONFIG, DEFAULT_CONFIG.with_name("moe_tiny.yaml"), GPU_CONFIG)
"""Configs whose corpus is prepared first, from text that every machine has."""

WORKER = "triaxis.launch.pretrain_gpt"
"""Module that each rank runs: `main(argv) -> int` with the config's path and the overrides."""

START = "triaxis.launch.start.process.start_rank"
"""Module that torchrun runs: it imports the worker."""

FROM_SCRATCH = "--from-scratch"
"""Word that lets a run with saved checkpoints start at step 0 again."""


_LABEL = 8
"""Width of a row's label in columns."""
_UNLIMITED = 10**6
_CONTINUES = " \\"


@dataclass(frozen=True)
class Request:
    """A run to start. If `config_path` is None, `default_config` chooses the config."""

    config_path: Path | None
    overrides: tuple[str, ...]
    dry_run: bool = False
    verbose: bool = False
    """Print the line that starts the ranks and its environment; `dry_run` prints it too."""
    trains: bool = False
    """Whether the worker trains this configuration, so that its predicted memory must fit."""
    worker: str = WORKER
    worker_flags: tuple[str, ...] = ()
    """Worker arguments besides the configuration."""
    preflight: Callable[[Config, Path], str | None] | None = None
    """A check before ranks start; if it returns a text, the text is printed and nothing starts."""
    explained_codes: tuple[int, ...] = ()
    """Exit codes that all ranks agree on and rank 0 has explained: no rank has failed."""


@dataclass(frozen=True)
class LaunchPlan:
    """A run to start: its config and its world (ranks, nodes, device), checked together."""

    request: Request
    config: Config
    config_path: Path
    world: World
    sizes: ParallelSizes
    batch: BatchPlan
    memory: str = ""
    """Predicted memory in a line; empty if the worker does not train."""

    @property
    def worker_arguments(self) -> list[str]:
        return [str(self.config_path), *self.request.overrides, *self.request.worker_flags]


def launch(request: Request, variables: Mapping[str, str]) -> int:
    """Start a run, or show it, and return its exit code.

    A task of srun becomes one of the ranks; its process ends with the rank.

    Raises:
        ConfigError: all problems in the configuration at once.
        TopologyError: the ranks, nodes or GPUs do not fit.
        TriaxisError: the open-file limit is too low.
    """
    with lasting_output():
        return _be_a_rank(request, variables) if is_rank(variables) else _launch(request, variables)


def _launch(request: Request, environ: Mapping[str, str]) -> int:
    cleaned = without_other_launchers(environ)
    variables = cleaned.variables
    for name in cleaned.removed:
        os.environ.pop(name, None)
    console = Console(highlight=False, soft_wrap=True)
    for note in cleaned.notes:
        _row(console, "others", f"variables of another launcher {note}")
    plan = make_plan(request, variables)
    arguments = torchrun_arguments(plan, request.worker, variables)
    environment = import_variables(variables) | thread_variables(variables) | device_variables(plan.world)
    show(console, request, plan, arguments, environment)
    if request.dry_run:
        return 0
    allow_open_files()
    has_data = any(word.startswith("data.") for word in request.overrides)
    if request.worker == WORKER and plan.config_path.resolve() in STDLIB_CONFIGS and not has_data:
        exit_code = _prepare_corpus(console, plan.config, os.environ | environment)
        if exit_code:
            return exit_code
    if request.preflight is not None:
        instead = request.preflight(plan.config, plan.config_path)
        if instead is not None:
            print(instead)
            return 0
    sys.stdout.flush()  # before the ranks write to the same place
    exit_code = _run_phases(plan, arguments, environment)
    if exit_code == 0 and request.config_path is None and plan.config_path == GPU_CONFIG:
        measured = "measures speed, MFU and memory of a layout, beside the prediction"
        _row(console, "next", triaxis(f"bench {shlex.quote(_near(GPU_CONFIG))}") + f"   {measured}")
    return exit_code


def default_config(overrides: Sequence[str], variables: Mapping[str, str]) -> Path:
    """Choose the config for a command that names none.

    It is `GPU_CONFIG` on a node with GPUs, unless the run is to use the CPU.
    """
    on_cpu = f"runtime.device={CPU}" in overrides or not find_gpus(variables).count
    return DEFAULT_CONFIG if on_cpu else GPU_CONFIG


def make_plan(request: Request, variables: Mapping[str, str]) -> LaunchPlan:
    """Resolve the config, choose the world, and check both together."""
    overrides = request.overrides
    path = request.config_path or default_config(overrides, variables)
    gpus = find_gpus(variables)
    devices = read_devices(variables) if request.trains and gpus.count else None
    rules = [*RULES_OF_A_RUN, *([] if devices is None else [memory_rule(devices)])]
    config = load_config(path, overrides, variables, more_rules=rules)
    world = decide(config, gpus, variables, rules)
    ranks_per_node = config.runtime.ranks_per_node or world.ranks_per_node
    require_legal(config, str(path), world.size, ranks_per_node, rules)
    sizes = parallel_sizes(config, world.size)
    refuse_without_gpu(config, has_gpu=config.runtime.device != "cpu" and gpus.count > 0, note=gpus.note)
    return LaunchPlan(
        request,
        config,
        path,
        world,
        sizes,
        batch_plan(config, sizes.dp),
        _memory_line(config, sizes, world, devices) if request.trains else "",
    )


def _memory_line(config: Config, sizes: ParallelSizes, world: World, devices: Devices | None) -> str:
    most = devices.for_each_rank(config, world.ranks_per_node) if devices is not None and uses_gpu(config) else None
    return memory_line(predict(config, sizes, nccl=world.backend == NCCL), most)


def torchrun_arguments(plan: LaunchPlan, worker: str, variables: Mapping[str, str]) -> list[str]:
    """Return the words after `python -m torch.distributed.run`.

    Raises:
        TopologyError: there are several nodes, and this node's number or the meeting place is missing.
    """
    world = plan.world
    ranks = [f"--nproc-per-node={world.ranks_per_node}"]
    if world.num_nodes > 1:
        if not variables.get("NODE_RANK", "").isdigit() or (variables.get("MASTER_ADDR") or LOOPBACK[0]) in LOOPBACK:
            raise TopologyError(
                f"NNODES={world.num_nodes}, NODE_RANK={variables.get('NODE_RANK', 'unset')}, "
                f"MASTER_ADDR={variables.get('MASTER_ADDR', 'unset')}: each of several nodes needs its number and an "
                "address of node 0 that all of them resolve, or every node waits alone. For example, on the second "
                f"node, put this before the same command:\n  NNODES={world.num_nodes} NODE_RANK=1 MASTER_ADDR=<node 0>"
            )
        ranks = [f"--nnodes={world.num_nodes}", f"--node-rank={variables['NODE_RANK']}", *ranks]
    if world.num_nodes > 1 or variables.get("MASTER_PORT"):
        ranks += [
            f"--master-addr={variables.get('MASTER_ADDR') or LOOPBACK[0]}",
            f"--master-port={variables.get('MASTER_PORT') or DEFAULT_PORT}",
        ]
    else:
        # A free port keeps two runs on one machine apart; the numeric address needs no name resolution.
        ranks += ["--standalone", f"--local-addr={LOOPBACK[0]}"]
    return [*ranks, "--module", START, worker, *plan.worker_arguments]


def thread_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return OMP_NUM_THREADS=1 for a rank; empty if the user set that variable."""
    return {} if "OMP_NUM_THREADS" in variables else {"OMP_NUM_THREADS": "1"}


def device_variables(world: World) -> dict[str, str]:
    """Return the chosen device and backend as variables for the ranks."""
    return {DEVICE_VARIABLE: world.device, BACKEND_VARIABLE: world.backend}


def show(
    console: Console, request: Request, plan: LaunchPlan, arguments: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Print what was chosen for a run, with reasons.

    Layout, batch and memory are left out if a training run starts, because its rank 0 prints them.
    """
    world = plan.world
    nodes = "1 node" if world.num_nodes == 1 else f"{world.num_nodes} nodes of {world.ranks_per_node}"
    _row(console, "config", shlex.join([_near(plan.config_path), *plan.worker_arguments[1:]]))
    _row(console, "ranks", f"{world.size} on {nodes}, {world.backend} ({world.reason})")
    if request.dry_run or request.worker != WORKER:
        _row(console, "layout", str(plan.sizes))
        _row(console, "batch", str(plan.batch))
        if plan.memory:
            _row(console, "memory", plan.memory)
    if request.dry_run or request.verbose:
        words = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        words += map(shlex.quote, [sys.executable, "-m", "torch.distributed.run", *arguments])
        _lines(console, "launch", _continued(words, _width(console)))


def _row(console: Console, name: str, text: str) -> None:
    """Print a text after the label `name`, wrapped between words on a terminal."""
    _lines(console, name, wrapped(text, _width(console)))


def _lines(console: Console, name: str, lines: Iterable[str]) -> None:
    head = f"{name:<{_LABEL}}"
    for line in lines:
        console.print(f"[bold]{head}[/bold]", end="")
        console.print(line, markup=False)
        head = " " * _LABEL


def _width(console: Console) -> int:
    """Columns left for a row's text; unlimited in a pipe or a file."""
    return console.width - _LABEL if console.is_terminal else _UNLIMITED


def _continued(words: Sequence[str], width: int) -> Iterator[str]:
    """Yield a command in lines that can be pasted. Each but the last ends with a backslash."""
    line = ""
    for word in words:
        if line and len(line) + 1 + len(word) + len(_CONTINUES) > width:
            yield line + _CONTINUES
            line = word
        else:
            line = f"{line} {word}" if line else word
    yield line


def _near(path: Path) -> str:
    """Shorten a path to what can be typed in the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _prepare_corpus(console: Console, config: Config, variables: Mapping[str, str]) -> int:
    """Prepare missing corpora from the Python standard library's source files. Return 0, or a failure's exit code."""
    for prefix in (source.path for source in config.data.train):
        if not (bin_path(prefix).exists() and idx_path(prefix).exists()):
            _row(console, "corpus", f"{prefix} is not there yet, so it is prepared first, from the sources of Python")
            sys.stdout.flush()
            command = [sys.executable, "-m", "triaxis.launch.cli", "prepare", "--stdlib", "--output", prefix, "--quiet"]
            prepared = subprocess.run(
                [*command, "--tokenizer", config.data.tokenizer or BYTES], env=variables, check=False
            )
            if prepared.returncode:
                return prepared.returncode
    return 0


def _run_phases(plan: LaunchPlan, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the ranks, once per phase of the run, and return the exit code."""
    os.environ.update(environment)
    from triaxis.launch.start.rendezvous import MeetingPlace

    place, words = MeetingPlace(), list(arguments)
    while (code := _run_torchrun(plan, words, place)) == ExitCode.NEXT_PHASE:
        # Checkpoints that this command has saved so far must not be set aside.
        words = [word for word in words if word != FROM_SCRATCH]
    return code


def _run_torchrun(plan: LaunchPlan, arguments: Sequence[str], place: "MeetingPlace") -> int:
    """Run torchrun inside this process, print why it failed, and return the exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from triaxis.launch.start.process.short_end import short_end

    # torchrun logs every process that it ends; only the first cause is described, below.
    for noisy in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{noisy}").setLevel(logging.CRITICAL)
    started_seconds, kills = time.time(), kernel_kills()
    words = torchrun.parse_args(list(arguments))
    place.use(words)
    signals = ForwardedSignals(leave=lambda number: end(_stopped_by(number)))
    try:
        with short_end(OTHERS_END_SECONDS), signals.listening(words):
            torchrun.run(words)
    except NoRanksError:
        return _stopped_by(signals.first)
    except SignalException as stopped:
        return _stopped_by(stopped.sigval)
    except ChildFailedError as failed:
        name = run_name(plan.config, plan.config_path.stem, os.environ)
        directory = RunDirectory.join(plan.config.runtime.runs_dir, name, 0)
        logs = directory.path / LOGS
        has_gpu = plan.world.device == CUDA
        failures = [
            RankFailure(rank, one.exitcode, one.timestamp, where(one.local_rank if has_gpu else None, one.pid))
            for rank, one in failed.failures.items()
        ]
        codes = (*AFTER.values(), *plan.request.explained_codes)
        agreed = [code for code in codes if any(failure.exit_code == code for failure in failures)]
        if agreed:
            _show_cursor()
            return agreed[0]
        if any(failure.exit_code == ExitCode.HUNG for failure in failures):
            _show_cursor()
            print(describe_hang(failures, logs, started_seconds), file=sys.stderr)
            return ExitCode.HUNG
        cause = first_cause(failures, logs, started_seconds)
        has_begun = last_log(logs, cause.rank, started_seconds) is not None
        if signals.first is not None and (not has_begun or cause.exit_code in (-signals.first, -signal.SIGKILL)):
            return _stopped_by(signals.first)
        _show_cursor()
        # Rank 0 has already explained a user's mistake.
        if (cause.rank, cause.exit_code) != (0, ExitCode.MISTAKE):
            killed = kernel_kills() > kills
            print(describe(cause, logs, started_seconds, kernel_killed=killed), file=sys.stderr)
            if plan.memory and (cause.exit_code < 0 or cause.exit_code == ExitCode.BROKE):
                print(f"next: {directory.next_start(plan.config)}", file=sys.stderr)
        return cause.exit_code if cause.exit_code > 0 else 128 - cause.exit_code
    return 0


def _stopped_by(signal_number: signal.Signals | None) -> int:
    """Print which signal ended this node's ranks. Return the exit code, 128 + the signal's number."""
    assert signal_number is not None, "a signal ended them"
    _show_cursor()
    print(f"stopped by {signal_number.name}; all ranks of this node have ended", file=sys.stderr)
    return 128 + signal_number


def _show_cursor() -> None:
    """Show the cursor, which a killed rank 0 leaves hidden."""
    Console().show_cursor()


def _be_a_rank(request: Request, variables: Mapping[str, str]) -> int:
    """Run the worker in this srun task and end the process with its exit code. A dry run prints rank 0's variables."""
    ours = rank_variables(variables)
    path = request.config_path or default_config(request.overrides, variables)
    arguments = [str(path), *request.overrides, *request.worker_flags]
    if not request.dry_run:
        os.environ.update(ours | thread_variables(variables))
        run_rank(importlib.import_module(request.worker).main, arguments)
    if ours["RANK"] == "0":
        print("rank 0 of this SLURM step:", *(f"{name}={value}" for name, value in ours.items()))
    return 0
