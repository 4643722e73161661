"""Operators of a step, ours compared with the plain loop's, by place: embedding, blocks, head and loss, optimizer.

Both sides run one step of the same model, one process, on the same microbatches. Each aten operator is counted where it ran: the
place of a forward is the module that is at work, that of a backward is the module whose output's gradient came last, and what
comes after the last backward is the optimizer's. Views cost no kernel and are counted apart. Bytes are those of the tensors that an
operator returns or writes.

    python -m benchmarks.operators
    python -m benchmarks.operators --models llama --dtypes bf16 --layers 4
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.engine_overhead import LEARNING_RATE, add_model_options, batches_of, build_engine, config_of
from benchmarks.plain_gpt import PlainLoop
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import Batches, MicroBatch
from triaxis.engine.step import Engine
from triaxis.engine.step_result import BatchLosses
from triaxis.models.gpt.chunk import GPTChunk

Place = Literal["embedding", "blocks", "head and loss", "optimizer"]
PLACES: tuple[Place, ...] = ("embedding", "blocks", "head and loss", "optimizer")

NO_KERNEL = {
    *("aten::_unsafe_view", "aten::detach"),
    *("aten::empty_like", "aten::empty.memory_format", "aten::empty_strided", "aten::new_empty"),
}
"""Operators that compute nothing and whose schema does not say so."""


@dataclass(slots=True)
class Counts:
    """Counts of one place: kernels and views by operator, and bytes by operator."""

    kernels: Counter[str] = field(default_factory=Counter)
    views: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    @property
    def num_kernels(self) -> int:
        return sum(self.kernels.values())


class OperatorCounter(TorchDispatchMode):
    """A counter of operators by place. `place` is set by `watching`."""

    def __init__(self) -> None:
        super().__init__()
        self.place: Place = "embedding"
        self.counts: dict[Place, Counts] = {place: Counts() for place in PLACES}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace != "aten":
            return result
        counts, name = self.counts[self.place], func.name()
        if is_view(func):
            counts.views[name] += 1
        else:
            counts.kernels[name] += 1
            # What it writes: its results, or without any the lists that it changes (fused optimizers).
            written = [value for value in tree_iter(result) if isinstance(value, torch.Tensor)]
            counts.num_bytes[name] += sum(value.numel() * value.element_size() for value in written)
        return result

    @contextmanager
    def watching(self, modules: Sequence[tuple[nn.Module, Place]]) -> Iterator[None]:
        """Set the place by the module at work, in forward by its call, in backward by the gradient of its output."""

        def enter(place: Place) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any) -> None:
                self.place = place

            return hook

        def leave(place: Place) -> Callable[..., None]:
            def back_in(grad: torch.Tensor) -> None:
                self.place = place

            def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
                if place == "blocks":
                    self.place = "head and loss"  # until the next block
                if output.requires_grad:
                    output.register_hook(back_in)

            return hook

        hooks = []
        for module, place in modules:
            hooks.append(module.register_forward_pre_hook(enter(place)))
            hooks.append(module.register_forward_hook(leave(place)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def is_view(func: Any) -> bool:
    """Return whether it computes nothing: it returns part of its arguments unchanged, or memory that is not filled yet."""
    if func.name() in NO_KERNEL:
        return True
    returns = func._schema.returns
    return bool(returns) and any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


Side = tuple[Callable[[Sequence[MicroBatch]], object], Callable[[object], object], list[tuple[nn.Module, Place]]]
"""Forward and backward of all microbatches, the update with what it returned, and the modules by place."""


def engine_side(engine: Engine) -> Side:
    chunk = cast(GPTChunk, engine.chunks[0])
    assert chunk.embedding is not None
    modules: list[tuple[nn.Module, Place]] = [(chunk.embedding, "embedding")]
    modules += [(block, "blocks") for block in chunk.blocks]
    return engine.forward_backward, lambda losses: engine.update(cast(BatchLosses, losses), LEARNING_RATE), modules


def plain_side(loop: PlainLoop) -> Side:
    embedding: list[nn.Module | None] = [loop.model.word, loop.model.position]
    modules: list[tuple[nn.Module, Place]] = [(module, "embedding") for module in embedding if module is not None]
    modules += [(block, "blocks") for block in loop.model.blocks]
    return loop.forward_backward, lambda _: loop.update(LEARNING_RATE), modules


def count(side: Side, batches: Batches) -> dict[Place, Counts]:
    """Count a step's operators, after one uncounted step that makes the optimizer's state."""
    forward_backward, update, modules = side
    update(forward_backward(batches.next_step()))
    counter = OperatorCounter()
    microbatches = batches.next_step()
    with counter, counter.watching(modules):
        done = forward_backward(microbatches)
        counter.place = "optimizer"
        update(done)
    return counter.counts


def compare(config: Config) -> tuple[dict[Place, Counts], dict[Place, Counts]]:
    """Compare the engine's counts with the plain loop's."""
    engine = build_engine(config)
    loop = PlainLoop(config, {name: parameter.value.detach() for name, parameter in engine.parameters.items()})
    counts = []
    for side in (engine_side(engine), plain_side(loop)):
        batches = batches_of(config)
        counts.append(count(side, batches))
        batches.close()
    return counts[0], counts[1]


def show(title: str, ours: dict[Place, Counts], plain: dict[Place, Counts], console: Console) -> None:
    """Print a row for each operator of which the two sides have different numbers, and the sums of each place."""
    table = Table(title=title, title_justify="left")
    for heading in ("operator", "ours", "plain", "our MiB", "plain MiB"):
        table.add_column(heading, justify="left" if heading == "operator" else "right", no_wrap=True)
    for place in PLACES:
        a, b = ours[place], plain[place]
        sums = [a.num_kernels, b.num_kernels]
        sizes = [sum(counter.values()) / 2**20 for counter in (a.num_bytes, b.num_bytes)]
        table.add_row(f"{place}: kernels", *(f"{n:,}" for n in sums), *(f"{n:,.1f}" for n in sizes), style="bold")
        views = [sum(counter.values()) for counter in (a.views, b.views)]
        table.add_row(f"{place}: views", *(f"{n:,}" for n in views), "", "", style="dim")
        for name in sorted(a.kernels | b.kernels):
            if a.kernels[name] != b.kernels[name]:
                table.add_row(
                    f"  {name.removeprefix('aten::')}",
                    f"{a.kernels[name]:,}",
                    f"{b.kernels[name]:,}",
                    f"{a.num_bytes[name] / 2**20:,.1f}",
                    f"{b.num_bytes[name] / 2**20:,.1f}",
                )
        table.add_section()
    console.print(table)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.operators",
        description="Operators that a step dispatches, by place, the engine's compared with a plain PyTorch loop's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_model_options(parser)
    options = parser.parse_args(argv)
    for model in options.models:
        for dtype in options.dtypes:
            ours, plain = compare(config_of(options, model, dtype))
            show(
                f"{model} {dtype}: {options.layers} layers, {options.microbatches} microbatches", ours, plain, Console()
            )


if __name__ == "__main__":
    main(sys.argv[1:])
