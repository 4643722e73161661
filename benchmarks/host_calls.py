"""Calls of the host for one layer and one microbatch, forward and backward, beside a layer written by hand: counted, never timed.

    aten operators    all that are dispatched, views too: each is a call through torch's dispatcher, most from the interpreter
    Python calls      of functions written in Python or C, the hooks and functions of autograd among them

Both are differences of two depths, divided by layers and microbatches, so what a step does once falls away. A GPU at small
microbatches waits for the host; the counts are the same on every machine with one version of torch and Python. `plain` is
`plain_gpt.py` with the same shapes.

    python -m benchmarks.host_calls
    python -m benchmarks.host_calls --models llama --dtypes bf16 --by-name
"""

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.models import DTYPES, LEARNING_RATE, MODELS, add_sizes, batches_of, build_engine, config_of
from benchmarks.plain_gpt import PlainLoop
from triaxis.engine.config.tree import Config

NO_KERNEL = {
    *("aten::_unsafe_view", "aten::detach"),
    *("aten::empty_like", "aten::empty.memory_format", "aten::empty_strided", "aten::new_empty"),
}
"""Operators that compute nothing and whose schema does not say so."""

Side = tuple[Callable[..., Any], Callable[[Any], object]]
"""Forward and backward of all microbatches, and the update with what it returned."""


def ours(config: Config) -> Side:
    engine = build_engine(config)
    return engine.forward_backward, lambda losses: engine.update(losses, LEARNING_RATE).wait()


def plain(config: Config) -> Side:
    weights = {name: parameter.value.detach() for name, parameter in build_engine(config).parameters.items()}
    loop = PlainLoop(config, weights)
    return loop.forward_backward, lambda _: loop.update(LEARNING_RATE)


SIDES: Mapping[str, Callable[[Config], Side]] = {"ours": ours, "plain": plain}


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
    def num_kernels(self) -> float:
        return sum(self.kernels.values())

    @property
    def num_operators(self) -> float:
        return self.num_kernels + sum(self.views.values())

    @property
    def num_python(self) -> float:
        return sum(self.python.values())


def host_calls(config: Config, make: Callable[[Config], Side] = ours, *, layers: tuple[int, int] = (2, 4)) -> HostCalls:
    """Count the calls of a model's step in one process.

    Args:
        config: of the model; its number of layers is not used.
        make: builds the side that is counted.
        layers: the two depths.
    """
    first, second = (_step_calls(_with_layers(config, number), make) for number in layers)
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


def _step_calls(config: Config, make: Callable[[Config], Side]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Count kernels, views and Python calls in a forward and backward of all microbatches."""
    (forward_backward, update), batches = make(config), batches_of(config)
    update(forward_backward(batches.next_step()))
    operators = _Operators()
    with operators:
        done = forward_backward(batches.next_step())
    update(done)
    microbatches = batches.next_step()
    with _python_calls() as python:
        forward_backward(microbatches)
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


def is_view(func: Any) -> bool:
    """Return whether it computes nothing: it returns part of its arguments unchanged, or memory that is not filled yet."""
    if func.name() in NO_KERNEL:
        return True
    returns = func._schema.returns
    return bool(returns) and any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


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


def show(title: str, calls: Mapping[str, HostCalls], console: Console, *, by_name: bool) -> None:
    """Print the sums of each side, and each name's number."""
    table = Table(title=title, title_justify="left")
    table.add_column("per layer and microbatch")
    for side in calls:
        table.add_column(side, justify="right")
    for heading, kind in (("kernels", "kernels"), ("views", "views"), ("Python calls", "python")):
        counts: list[dict[str, float]] = [getattr(each, kind) for each in calls.values()]
        table.add_row(heading, *(f"{sum(each.values()):,.1f}" for each in counts), style="bold")
        most = {name: number for each in reversed(counts) for name, number in each.items()} if by_name else {}
        for name in sorted(most, key=lambda name: -most[name]):
            shown = name.removeprefix("aten::").split("/site-packages/")[-1]
            table.add_row(f"  {shown}", *(f"{each.get(name, 0):,.1f}" for each in counts))
    console.print(table)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_calls",
        description="Calls of the host per layer and microbatch, counted, beside a layer written by hand.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_sizes(parser)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which models")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="which")
    parser.set_defaults(hidden=64, head_dim=16, seq=16, vocab=128)
    parser.add_argument("--by-name", action="store_true", help="list each operator and function")
    options = parser.parse_args(argv)
    for model in options.models:
        for dtype in options.dtypes:
            config = config_of(options, model, dtype)
            calls = {name: host_calls(config, make) for name, make in SIDES.items()}
            show(f"{model} {dtype}", calls, Console(), by_name=options.by_name)


if __name__ == "__main__":
    main(sys.argv[1:])
