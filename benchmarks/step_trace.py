"""Trace one training step: the files that its reader has to open, and the way through them.

    files, code lines, classes    of the files that the step enters; code lines as `benchmarks.code_lines` counts them
    executed                      code lines that run; the others serve other configurations
    stays                         how often the calls inside a call change file, plus one, on the way that most calls take
    union                         the files that any of the configurations enters

A step is what computes its numbers: it reads the batch, runs forward, backward, the reduction and the update, and reads the result.
The second step is traced, because the first one does things that happen once. Eight ranks talk over gloo. The ranks of one replica
with tensor-parallel rank 0 trace: together they hold every stage of the pipeline. Kernels run as they are written, not compiled.

    python -m benchmarks.step_trace                        # all configurations, and their union
    python -m benchmarks.step_trace gpt_tiny --files       # each file, in the order in which the step enters them
    python -m benchmarks.step_trace gpt_tiny --ways        # the stays of a layer's forward and of a column-parallel backward
    python -m benchmarks.step_trace gpt_tiny --page        # writes the files of docs/afternoon.md
"""

import argparse
import ast
import os
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import multiprocessing

from benchmarks.code_lines import is_code
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes, rank_grid
from triaxis.engine.config.tree import Config
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.launch.footprint.run import AS_WRITTEN
from triaxis.launch.rank.batches import open_batches
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("engine", "models", "launch")
WORLD_SIZE = 8

SHORT = "model.seq_length=32"

CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "gpt_tiny": ("gpt_tiny",),
    "moe_tiny": ("moe_tiny",),
    "cp": ("gpt_tiny", "parallel.cp=2", "parallel.dp=1"),
    "fp8": ("gpt_tiny", "precision.dtype=bf16", "precision.fp8={recipe: tensorwise}"),
    "zbv": ("gpt_tiny", "schedule.name=zbv", "recompute.granularity=selective"),
}
"""Words of each traced configuration: a file of configs/, then changes."""

PAGE = ROOT / "docs" / "afternoon.md"
BEGIN, END = "<!-- written by: python -m benchmarks.step_trace gpt_tiny --page -->\n", "<!-- end of the trace -->\n"

WAYS = {"layer forward": "Block.forward", "column backward": "_ColumnParallel.backward"}
"""Calls whose stays are counted, by qualified name."""


@dataclass
class Trace:
    """What one step of one rank entered.

    Attributes:
        lines: executed lines by file (relative to the checkout), files in the order of their first line.
        ways: for each of `WAYS`, the files that its calls entered in order (neighbours differ), and how many calls took that way.
    """

    lines: dict[str, set[int]] = field(default_factory=dict)
    ways: dict[str, Counter[tuple[str, ...]]] = field(default_factory=lambda: {way: Counter() for way in WAYS})

    def add(self, other: "Trace") -> None:
        """Add what another rank, or another configuration, entered."""
        for path, lines in other.lines.items():
            self.lines.setdefault(path, set()).update(lines)
        for way, taken in other.ways.items():
            self.ways[way] += taken

    def usual(self, way: str) -> tuple[str, ...]:
        """Return the way that most calls took: the first and last microbatches' also wait for weights or post buckets."""
        return self.ways[way].most_common(1)[0][0]


class Tracer:
    """Follows every line of the product that this thread runs. Use as a context; `trace` has the result."""

    def __init__(self) -> None:
        self.trace = Trace()
        self._paths: dict[str, str | None] = {}
        self._open: dict[FrameType, tuple[str, list[str]]] = {}

    def __enter__(self) -> "Tracer":
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        path = self._path(frame.f_code.co_filename)
        if path is None:
            return None
        for way, name in WAYS.items():
            if frame.f_code.co_qualname == name:
                self._open[frame] = way, []
        for _, files in self._open.values():
            files.append(path)
        seen = self.trace.lines.setdefault(path, set())

        def line(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            if event == "line":
                seen.add(frame.f_lineno)
            elif event == "return" and frame in self._open:
                way, files = self._open.pop(frame)
                self.trace.ways[way][tuple(file for file, _ in groupby(files))] += 1
            return line

        return line

    def _path(self, filename: str) -> str | None:
        if filename not in self._paths:
            path = Path(filename).resolve()
            is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS
            self._paths[filename] = str(path.relative_to(ROOT)) if is_ours else None
        return self._paths[filename]


@dataclass(frozen=True)
class Source:
    """A product file: its code lines, and which of them ran."""

    path: str

    @cached_property
    def _module(self) -> ast.Module:
        return ast.parse((ROOT / self.path).read_text())

    @property
    def sentence(self) -> str:
        """The first sentence of the module's docstring."""
        return (ast.get_docstring(self._module) or "").split("\n\n")[0].replace("\n", " ")

    @cached_property
    def statements(self) -> list[ast.stmt]:
        return [node for node in ast.walk(self._module) if is_code(node)]

    @property
    def num_classes(self) -> int:
        return sum(isinstance(statement, ast.ClassDef) for statement in self.statements)

    def num_executed(self, lines: set[int]) -> int:
        """Count the statements with an executed line; a definition counts when something in it ran."""
        return sum(not lines.isdisjoint(range(node.lineno, _end(node) + 1)) for node in self.statements)


def _end(node: ast.stmt) -> int:
    """Return the last line of a statement; of an `if`, a loop or a `with`, the last line before its body."""
    body = getattr(node, "body", None)
    if body and not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return max(node.lineno, int(body[0].lineno) - 1)
    return node.end_lineno or node.lineno


def config_of(words: Sequence[str]) -> Config:
    """Return the resolved configuration of `CONFIGURATIONS`' words, for `WORLD_SIZE` ranks."""
    name, *changes = words
    path = ROOT / "configs" / f"{name}.yaml"
    config = load_config(
        path,
        [SHORT, *(f"{key}={choice}" for key, choice in AS_WRITTEN.items()), *changes],
        world_size=WORLD_SIZE,
        ranks_per_node=WORLD_SIZE,
    )
    return resolve_recompute(config, parallel_sizes(config, WORLD_SIZE))


def trace_rank(rank: int, words: Sequence[str]) -> Trace | None:
    """Make two steps of an initialised process group; return the trace of the second, None from ranks that are not traced."""
    config = config_of(words)
    sizes = parallel_sizes(config, WORLD_SIZE)
    model = config.model
    topology = Topology(
        rank_grid(config, sizes, WORLD_SIZE),
        rank,
        torch.device("cpu"),
        kv_heads=model.kv_heads,
        has_experts=model.has_experts,
    )
    engine = build(config, topology, build_chunks)
    batches = open_batches(config, topology, SyntheticDataset(config.train.seed, model.vocab_size, model.seq_length))
    _step(engine, batches)
    at = topology.coordinates
    if (at.tp, at.cp, at.dp) != (0, 0, 0):
        _step(engine, batches)
        return None
    with Tracer() as tracer:
        _step(engine, batches)
    return tracer.trace


def _step(engine: Engine, batches: Any) -> None:
    microbatches = batches.next_step()
    labels = engine.post_labels(batches.next_labels())
    engine.update(engine.forward_backward(microbatches, labels=labels), lr=1e-3).wait()


def merged(traces: Sequence[Trace | None]) -> Trace:
    """Return the union of the traces, in the order in which their ranks first enter a file."""
    union = Trace()
    for trace in traces:
        if trace is not None:
            union.add(trace)
    return union


def _in_process(rank: int, words: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    trace = trace_rank(rank, words)
    Path(folder, f"rank_{rank}").write_bytes(pickle.dumps(trace))
    dist.barrier()


def trace_of(words: Sequence[str]) -> Trace:
    """Start the ranks of a configuration and return their merged trace."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(_in_process, (words, folder), nprocs=WORLD_SIZE, start_method="fork")
        found = [pickle.loads(Path(folder, f"rank_{rank}").read_bytes()) for rank in range(WORLD_SIZE)]
    return merged(found)


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of a trace, all of files that the step enters."""

    files: int
    code_lines: int
    classes: int
    ways: dict[str, int]
    executed: int = 0


def counts(trace: Trace) -> Counts:
    """Count a trace."""
    sources = {path: Source(path) for path in trace.lines}
    return Counts(
        files=len(sources),
        code_lines=sum(len(source.statements) for source in sources.values()),
        executed=sum(source.num_executed(trace.lines[path]) for path, source in sources.items()),
        classes=sum(source.num_classes for source in sources.values()),
        ways={way: len(trace.usual(way)) for way in trace.ways},
    )


def show(found: dict[str, Trace], console: Console) -> None:
    """Print a row for each trace, and one for their union."""
    table = Table("step", "files", "code lines", "executed", "classes", *WAYS, box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    union = {"union": merged(list(found.values()))} if len(found) > 1 else {}
    for name, trace in (found | union).items():
        row = counts(trace)
        cells = (row.files, row.code_lines, row.executed, row.classes, *row.ways.values())
        table.add_row(name, *(f"{cell:,}" for cell in cells))
    console.print(table)


def show_files(trace: Trace, console: Console) -> None:
    """Print each file with its code lines, those that ran, and its classes."""
    table = Table("file", "code lines", "executed", "classes", box=None, header_style="bold")
    for path, lines in trace.lines.items():
        source = Source(path)
        table.add_row(path, *map(str, (len(source.statements), source.num_executed(lines), source.num_classes)))
    console.print(table)


def page_of(trace: Trace, page: str) -> str:
    """Return docs/afternoon.md with the files of a trace, in order, each with the first sentence of its docstring."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    lines = [
        f"{number}. [{path}](../{path}): {Source(path).sentence}\n" for number, path in enumerate(trace.lines, start=1)
    ]
    return "".join((before, BEGIN, "\n", *lines, "\n", END, after))


def main(argv: Sequence[str] | None = None) -> None:
    """Trace the named configurations and print their numbers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_trace", description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=list(CONFIGURATIONS), metavar="NAME", help=", ".join(CONFIGURATIONS)
    )
    parser.add_argument("--files", action="store_true", help="each file, in the order in which the step enters them")
    parser.add_argument("--ways", action="store_true", help="the files of each counted call, in order")
    parser.add_argument("--page", action="store_true", help="write the files of docs/afternoon.md")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = {name: trace_of(CONFIGURATIONS[name]) for name in arguments.names}
    console = Console(width=120)
    show(found, console)
    if arguments.page:
        PAGE.write_text(page_of(found["gpt_tiny"], PAGE.read_text()))
    for trace in found.values():
        if arguments.files:
            show_files(trace, console)
        if arguments.ways:
            for way in trace.ways:
                console.print(f"{way}: " + " > ".join(trace.usual(way)), soft_wrap=True)


if __name__ == "__main__":
    main()
