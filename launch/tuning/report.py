"""Format `triaxis bench` results as plain text and as JSON, with the machine.

torch is imported only after the runs, because a process that has queried a GPU holds memory on it.
"""

import os
import platform
import shlex
import subprocess
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from triaxis.engine.config.tree import Config
from triaxis.engine.errors import counted
from triaxis.engine.program import ROOT
from triaxis.engine.telemetry.outlets.format import in_bytes, significant
from triaxis.engine.telemetry.record.flops import CONVENTION, convention
from triaxis.engine.telemetry.record.peaks import PeakRate, known_peak
from triaxis.launch.pictures.tables import aligned
from triaxis.launch.tuning.layer_costs import LayerCosts
from triaxis.launch.tuning.layouts import Failed, LayoutResult, rank_outcomes
from triaxis.models.specs import num_parameters

CPU_INFO = Path("/proc/cpuinfo")
COLUMNS, NAME_WIDTH = 100, 10
"""Width of the text block, and of the column of names at its left, in characters."""
LEAST_SHARE = 0.0005
"""Shares below this, which would print as 0.0 %, are left out."""


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """The machine that layouts were tried on.

    Attributes:
        device: name of the GPU or of the CPU.
        count: number of GPUs, or of CPU cores that this process may use.
        is_gpu: whether the ranks ran on GPUs.
        driver: GPU driver; "none" on a CPU.
        versions: torch, CUDA, NCCL and Python versions by name.
        commit: the checkout's commit, with "+changes" if files differ from the commit.
    """

    device: str
    count: int
    is_gpu: bool
    driver: str
    versions: Mapping[str, str]
    commit: str

    @property
    def rank(self) -> str:
        """Return the report's word for a rank: "GPU", or "rank" if ranks run on CPUs."""
        return "GPU" if self.is_gpu else "rank"


def look_at_machine(*, is_gpu: bool) -> MachineRecord:
    """Collect the machine's names and versions. With `is_gpu`, this process holds memory on the GPU from now on."""
    import torch

    versions = {"torch": str(torch.__version__), "Python": platform.python_version()}
    if not is_gpu:
        return MachineRecord(cpu_name(), len(os.sched_getaffinity(0)), is_gpu, "none", versions, git_commit())
    from triaxis.launch.doctor.facts import driver

    versions |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    name, count = torch.cuda.get_device_name(0), torch.cuda.device_count()
    return MachineRecord(name, count, is_gpu, driver(), versions, git_commit())


def cpu_name(path: Path = CPU_INFO) -> str:
    """Return the processor's model name from Linux's cpuinfo file at `path`. If the file has none, return the architecture."""
    lines = path.read_text().splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def git_commit(root: Path = ROOT) -> str:
    """Return the checkout's commit, or "no git checkout". "+changes" is appended if tracked files differ from the commit."""
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # git is not installed, or knows no commit
        return "no git checkout"
    return found.stdout.strip()


@dataclass(frozen=True, slots=True)
class Tried:
    """The command and the results of a finished `triaxis bench`.

    Attributes:
        words: command line, including the program's name.
        name: name of the tried configuration.
        num_steps: number of steps per layout.
        outcomes: results in the order in which the layouts were tried.
    """

    words: Sequence[str]
    name: str
    num_steps: int
    machine: MachineRecord
    outcomes: Sequence[LayoutResult | Failed]

    def peak(self, config: Config) -> PeakRate | None:
        """Return the peak FLOP rate that MFU divides by. None: the peak is unknown for this device and dtype."""
        if config.telemetry.peak_tflops is not None:
            return PeakRate(config.telemetry.peak_tflops, "telemetry.peak_tflops")
        if not self.machine.is_gpu:
            return None
        precision = config.precision
        return known_peak(self.machine.device, precision.dtype, in_fp8=precision.fp8 is not None)


def to_text(tried: Tried) -> str:
    """Format the text block of the report.

    The block has the machine, a row per layout, fastest first, and the failures with their reasons.
    """
    measured, failed = rank_outcomes(tried.outcomes)
    lines = list(_named(_asked(tried, measured)))
    if measured:
        lines += ["", *_table(tried, measured), "", *_times(measured)]
        lines += ["", *_layers(measured)] if any(one.layer is not None for one in measured) else []
        lines += ["", *_named(_meanings(tried, measured))]
    if failed:
        lines += ["", "not trained:"]
        for one in failed:
            first, *rest = one.reason.splitlines()
            lines += [f"  {one.layout}: {first}", *(f"    {line.strip()}" for line in rest)]
    return "\n".join(lines) + "\n"


def _named(rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of (name, text) rows, folded at `COLUMNS`. A command stays on one line for pasting."""
    for name, text in rows:
        width = len(text) + 1 if name == "command" else COLUMNS - NAME_WIDTH
        first, *rest = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        yield f"{name:<{NAME_WIDTH}}{first}"
        yield from (" " * NAME_WIDTH + line for line in rest)


def _asked(tried: Tried, measured: Sequence[LayoutResult]) -> Iterator[tuple[str, str]]:
    """Yield the rows about the command, the machine and the model."""
    machine = tried.machine
    count = f"{machine.count} x " if machine.is_gpu else ""
    cores = "" if machine.is_gpu else f", {counted(machine.count, 'core')}"
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    yield "command", shlex.join(tried.words)
    yield "machine", f"{count}{machine.device}{cores}; driver {machine.driver}; {versions}; commit {machine.commit}"
    if not measured:
        return
    # Equal in all layouts.
    config = measured[0].config
    yield (
        "model",
        f"{tried.name}: {num_parameters(config.model):,} parameters, {config.precision.dtype}, "
        f"sequence {config.model.seq_length:,}; random tokens, {config.train.global_batch_size:,} samples per step, "
        f"{config.train.micro_batch_size:,} per microbatch",
    )


def _meanings(tried: Tried, measured: Sequence[LayoutResult]) -> Iterator[tuple[str, str]]:
    """Yield (term, explanation) for the table's numbers, such as `MFU`."""
    machine, one = tried.machine, measured[0]
    peak = tried.peak(one.config)
    yield "speeds", f"the median of steps {one.first_step} to {one.last_step}; ranks: {one.device}"
    about = (
        "not known for this device and dtype, so there is no MFU; telemetry.peak_tflops=N sets it"
        if peak is None
        else f"{peak.tflops:,g} TFLOP/s per {machine.rank} ({peak.source})"
    )
    yield (
        "MFU",
        f"tokens/s per {machine.rank} x FLOPs per token / peak; FLOPs per token = {convention(one.config.model)}",
    )
    yield "peak", about
    held = "allocated by torch" if machine.is_gpu else "resident, Python and torch included"
    yield "memory", f"of the rank that held most: {held}, and predicted (weights, gradients, optimizer, activations)"


def _table(tried: Tried, measured: Sequence[LayoutResult]) -> Iterator[str]:
    rank = tried.machine.rank
    rows = [("", "layout", "ranks", f"tokens/s/{rank}", "tokens/s", "s/step", "MFU", "memory", "predicted")]
    for place, one in enumerate(measured, start=1):
        rows.append(
            (
                f"{place}.",
                one.layout,
                f"{one.num_ranks}",
                f"{one.tokens_per_second_per_rank:,.0f}",
                f"{one.tokens_per_second:,.0f}",
                significant(one.step_seconds),
                "-" if one.mfu is None else f"{one.mfu:.1%}",
                in_bytes(one.memory.measured),
                in_bytes(one.memory.predicted),
            )
        )
    return aligned(rows, left=(0, 1))


def _times(measured: Sequence[LayoutResult]) -> Iterator[str]:
    """Yield a line per layout with the shares of its step time."""
    yield "time of a step, to 100 %:"
    for place, one in enumerate(measured, start=1):
        shares = "  ".join(
            f"{part.removeprefix('exposed_')} {share:.1%}" for part, share in one.time.items() if share >= LEAST_SHARE
        )
        yield f"{place}.  {shares}"


def _layers(measured: Sequence[LayoutResult]) -> Iterator[str]:
    """Yield a table of the costs of a layer in each layout."""
    yield "a layer and a microbatch, traced on rank 0:"
    of_gpu, of_cpu = ("calls", "host us", "device us"), ("operators", "us", "in operators")
    rows: list[tuple[str, ...]] = [("", "", *(of_gpu if measured[0].is_gpu else of_cpu))]
    for place, one in enumerate(measured, start=1):
        assert one.layer is not None, "all layouts are traced, or none"
        costs: list[tuple[str, LayerCosts]] = [*(one.layer.measured or {}).items()]
        if one.layer.predicted is not None:
            costs.append(("both, predicted", one.layer.predicted))
        cells: list[tuple[str, ...]] = [(name, *(f"{each:,.0f}" for each in astuple(cost))) for name, cost in costs]
        if one.layer.measured is None:
            cells.insert(0, ("no layer is called: graphs are replayed", "", "", ""))
        rows += [("" if number else f"{place}.", *row) for number, row in enumerate(cells)]
    yield from aligned(rows, left=(0, 1))


def to_json(tried: Tried) -> dict[str, object]:
    """Convert a report to a JSON object with the same results.

    Times are in seconds, memory in bytes, and shares from 0 to 1.
    """
    measured, failed = rank_outcomes(tried.outcomes)
    peak = tried.peak(measured[0].config) if measured else None
    return {
        "command": list(tried.words),
        "machine": asdict(tried.machine),
        "parameters": num_parameters(measured[0].config.model) if measured else None,
        "steps": tried.num_steps,
        "flops_per_token": convention(measured[0].config.model) if measured else CONVENTION,
        "peak": None if peak is None else asdict(peak),
        "layouts": [
            asdict(one)
            | {
                "config": one.config.model_dump(mode="json"),
                "tokens_per_second_per_rank": one.tokens_per_second_per_rank,
            }
            for one in measured
        ],
        "failed": [asdict(one) for one in failed],
    }
