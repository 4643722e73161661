"""Calls of the host for one layer and one microbatch, forward and backward: counted, never timed.

    aten operators    all that are dispatched, views too: each is a call through torch's dispatcher, most from the interpreter
    Python calls      of functions written in Python or C, the hooks and functions of autograd among them

Both are differences of two depths, divided by layers and microbatches, so what a step does once falls away. A GPU at small
microbatches waits for the host; the counts are the same on every machine with one version of torch and Python.

    python -m benchmarks.host_calls
    python -m benchmarks.host_calls --models llama --dtypes bf16 --by-name
"""

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engine_overhead import LEARNING_RATE, add_model_options, batches_of, build_engine, config_of
from benchmarks.operators import is_view
from triaxis.engine.config.tree import Config


@dataclass(frozen=True, slots=True)
class HostCalls:
    """Calls per layer and microbatch.

    Attributes:
        kernels: aten operators that compute, by name.
        views: those that return a part of their arguments, or memory that is not filled yet, by name.
        python: functions by place of their code, or the name of one written in C.
    """

    kernels: dict[str, float]
    views: dict[str, float]
    python: dict[str, float]

    @property
    def num_operators(self) -> float:
        return sum(self.kernels.values()) + sum(self.views.values())

    @property
    def num_python(self) -> float:
        return sum(self.python.values())


def host_calls(config: Config, *, layers: tuple[int, int] = (2, 4)) -> HostCalls:
    """Count the calls of a model's step in one process.

    Args:
        config: of the model; its number of layers is not used.
        layers: the two depths.
    """
    first, second = (_step_calls(_with_layers(config, number)) for number in layers)
    microbatches = config.train.global_batch_size // config.train.micro_batch_size
    divisor = (layers[1] - layers[0]) * microbatches
    kernels, views, python = (
        {name: (b[name] - a[name]) / divisor for name in a | b if a[name] != b[name]}
        for a, b in zip(first, second, strict=True)
    )
    return HostCalls(kernels, views, python)


def _with_layers(config: Config, number: int) -> Config:
    values = config.model_dump(exclude_unset=True)
    values["model"]["num_layers"] = number
    return Config.model_validate(values)


def _step_calls(config: Config) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Count kernels, views and Python calls in a forward and backward of all microbatches."""
    engine, batches = build_engine(config), batches_of(config)
    engine.train_step(batches.next_step(), LEARNING_RATE)
    operators = _Operators()
    with operators:
        losses = engine.forward_backward(batches.next_step())
    engine.update(losses, LEARNING_RATE).wait()
    microbatches = batches.next_step()
    with _python_calls() as python:
        engine.forward_backward(microbatches)
    batches.close()
    return operators.kernels, operators.views, python


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.views: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        (self.views if is_view(func) else self.kernels)[func.name()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _python_calls() -> Iterator[Counter[str]]:
    """Count calls in this thread; autograd runs a CPU's backward in it too.

    The garbage collector waits: it would call the weak references of whatever else the process has left behind.
    """
    counts: Counter[str] = Counter()

    def on_event(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            counts[f"{code.co_filename}:{code.co_qualname}"] += 1
        elif event == "c_call":
            counts[getattr(argument, "__qualname__", repr(argument))] += 1

    before, collects = sys.getprofile(), gc.isenabled()
    gc.collect()
    gc.disable()
    sys.setprofile(on_event)
    try:
        yield counts
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


def show(title: str, calls: HostCalls, console: Console, *, by_name: bool) -> None:
    """Print the sums, and each name's number."""
    table = Table(title=title, title_justify="left")
    table.add_column("per layer and microbatch")
    table.add_column("calls", justify="right")
    for heading, counts in (("kernels", calls.kernels), ("views", calls.views), ("Python calls", calls.python)):
        table.add_row(heading, f"{sum(counts.values()):,.1f}", style="bold")
        if by_name:
            for name, number in sorted(counts.items(), key=lambda item: -item[1]):
                table.add_row(f"  {name.removeprefix('aten::').split('/site-packages/')[-1]}", f"{number:,.1f}")
    console.print(table)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_calls",
        description="Calls of the host per layer and microbatch, counted.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_model_options(parser)
    parser.set_defaults(hidden=64, head_dim=16, seq=16, vocab=128)
    parser.add_argument("--by-name", action="store_true", help="list each operator and function")
    options = parser.parse_args(argv)
    for model in options.models:
        for dtype in options.dtypes:
            calls = host_calls(config_of(options, model, dtype))
            show(f"{model} {dtype}", calls, Console(), by_name=options.by_name)


if __name__ == "__main__":
    main(sys.argv[1:])
