"""Benefit of each choice of `kernels`: the same kernel in its forms, in turn, on one device.

    OMP_NUM_THREADS=1 python -m benchmarks.kernels
    python -m benchmarks.kernels --device cuda --tokens 8192 --hidden 4096 --vocab 128256 --dtype bf16

A round times forward and backward of every form once, the order turning from round to round. The table gives the median time of
each, and the median of first form / other form with a distribution-free 95 % interval. Each run appends a line with machine,
versions, command and all numbers to `runs/benchmarks/kernels.jsonl`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.pairs import Interval, in_turn, median_interval
from benchmarks.records import append_record, machine
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.config.schema.layer_kinds import Rotary
from triaxis.engine.config.schema.training import OptimizerConfig, PrecisionConfig
from triaxis.engine.head.chunked_head import chunked_head_losses
from triaxis.engine.head.cross_entropy import vocab_parallel_cross_entropy
from triaxis.engine.kernels.activations import ActivationKernel
from triaxis.engine.kernels.dropout import keyed_dropout
from triaxis.engine.kernels.fusion import Fusion
from triaxis.engine.kernels.norms import NormKernel
from triaxis.engine.kernels.rotary import apply_rope, rope_tables, rotary_frequencies
from triaxis.engine.kernels.weight_grad import add_matmul
from triaxis.engine.layout.param_layout import layout_parameters
from triaxis.engine.layout.shard_spec import Init, ParamSpec, localize
from triaxis.engine.linear.layers import ColumnParallelLinear
from triaxis.engine.linear.weight_grads import WeightGradQueue
from triaxis.engine.numerics.precision import DTYPES, accumulation_dtype
from triaxis.engine.optimizer.distributed import DistributedOptimizer
from triaxis.engine.optimizer.grad_buffer import GradBuffers
from triaxis.engine.tensor_parallel.mappings import TensorParallelRegion
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

Call = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """Tokens [s, 1, h] in heads of size d, MLP width f, vocabulary v; elements of the optimizer's shard."""

    tokens: int
    hidden: int
    head_dim: int
    ffn: int
    vocab: int
    shard: int


@dataclass(frozen=True)
class Row:
    """One kernel: seconds of each form, and the first form's time over each other's."""

    kernel: str
    seconds: dict[str, float]
    speedup: dict[str, Interval]


def kernels(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, dict[str, Call]]]:
    """(name, a call per form) of every kernel."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    forms = {form: Fusion(form) for form in ("eager", "compiled")}
    t, h, heads = sizes.tokens, sizes.hidden, sizes.hidden // sizes.head_dim

    def both(make: Callable[[Fusion], torch.Tensor], leaf: torch.Tensor) -> dict[str, Call]:
        grad = torch.ones_like(make(forms["eager"]))

        def call(fusion: Fusion) -> torch.Tensor:
            leaf.grad = None
            make(fusion).backward(grad)
            return leaf.grad

        return {form: (lambda fusion=fusion: call(fusion)) for form, fusion in forms.items()}

    x, weight, bias = drawn(t, 1, h), drawn(h), drawn(h)
    yield "layer_norm", both(lambda fusion: NormKernel("layernorm", 1e-5, fusion)(x, weight, bias), x)
    yield "rms_norm", both(lambda fusion: NormKernel("rmsnorm", 1e-5, fusion)(x, weight), x)
    rotary = Rotary(sizes.head_dim, 1e4, scaling=None, is_long=False)
    frequencies = rotary_frequencies(rotary, accumulation_dtype(dtype), torch.device("cpu"))
    q, tables = drawn(t, 1, heads, sizes.head_dim), rope_tables(torch.arange(t).view(1, -1), frequencies)
    tables = tables.to(device)
    yield "rope of q", both(lambda fusion: apply_rope(q, tables, fusion), q)
    gate_up = drawn(t, 1, 2 * sizes.ffn)
    yield "swiglu", both(lambda fusion: ActivationKernel("swiglu", fusion)(gate_up), gate_up)
    residual, key = drawn(t, 1, h), torch.tensor([7], device=device).view(1, 1, 1)
    positions = torch.arange(t * h, device=device).view(t, 1, h)
    yield "dropout and residual", both(lambda fusion: keyed_dropout(x, residual, key, positions, 0.1, fusion), x)

    logits, targets = drawn(t, 1, sizes.vocab), torch.zeros(t, 1, dtype=torch.int64, device=device)
    axis = Axis("tp", [0], 0, None, Ledger())

    def losses(fusion: Fusion) -> torch.Tensor:
        # The backward writes over what it is given: the copy is part of both forms.
        return vocab_parallel_cross_entropy(logits * 1, targets, axis, sizes.vocab, fusion)

    yield "cross-entropy, and a copy", both(losses, logits)
    yield "head and cross-entropy", head_and_losses(sizes, drawn(t, 1, h), targets)

    grad, inputs = drawn(t, sizes.ffn).detach(), drawn(t, h).detach()
    wide = accumulation_dtype(dtype)
    main_grad = torch.zeros(sizes.ffn, h, dtype=wide, device=device)
    calls: dict[str, Call] = {"separate": lambda: add_matmul(main_grad, grad, inputs, overwrite=False)}
    if device.type == "cuda" and dtype != wide:
        calls["fused"] = lambda: add_matmul(main_grad, grad, inputs, overwrite=False, kernel="fused")
    yield "weight gradient", calls

    for name, precision in state_forms(dtype).items():
        yield name, {form: optimizer_step(sizes, precision, device, form) for form in ("torch", "compiled")}


def head_and_losses(sizes: Sizes, x: torch.Tensor, targets: torch.Tensor) -> dict[str, Call]:
    """Return calls with logits of all tokens, and of a quarter at a time (`recompute.head_tokens`); both add the weight's
    gradient.
    """
    precision = PrecisionConfig(dtype=_name_of(x.dtype))
    parameter, buffers = in_buffers("head.weight", (sizes.vocab, sizes.hidden), precision, x.device)
    axis = Axis("tp", [0], 0, None, Ledger())
    head = ColumnParallelLinear([parameter], [], TensorParallelRegion(axis, False), WeightGradQueue(), "head")

    def call(losses: Call) -> None:
        x.grad = None
        buffers.start(num_microbatches=1)
        losses().sum().backward()
        buffers.finish()

    ones = torch.ones(targets.shape, dtype=accumulation_dtype(x.dtype), device=x.device)
    forms = {
        "whole": lambda: vocab_parallel_cross_entropy(head(x), targets, axis, sizes.vocab),
        "in quarters": lambda: chunked_head_losses(x, targets, ones, head, sizes.vocab, -(-sizes.tokens // 4)),
    }
    return {form: (lambda losses=losses: call(losses)) for form, losses in forms.items()}


def state_forms(dtype: torch.dtype) -> dict[str, PrecisionConfig]:
    """Return the forms of the optimizer's state that a run in this dtype can have."""
    name = _name_of(dtype)
    forms = {"AdamW": PrecisionConfig(dtype=name)}
    if dtype == torch.bfloat16:
        forms["AdamW, split masters and bf16 moments"] = PrecisionConfig(dtype=name, masters="split", moments="bf16")
    return forms


def optimizer_step(sizes: Sizes, precision: PrecisionConfig, device: torch.device, form: str) -> Call:
    """Return one update of one flat shard."""
    shape = (sizes.shard // sizes.hidden, sizes.hidden)
    _, buffers = in_buffers("weight", shape, precision, device)
    optimizer = DistributedOptimizer(buffers, OptimizerConfig(), precision, is_compiled=form == "compiled")
    one, no = torch.ones((), device=device), torch.zeros((), dtype=torch.bool, device=device)
    return lambda: optimizer.step(1e-4, one, no)


def _name_of(dtype: torch.dtype) -> Any:
    return next(name for name, each in DTYPES.items() if each == dtype)


def in_buffers(
    name: str, shape: tuple[int, int], precision: PrecisionConfig, device: torch.device
) -> tuple[ShardedParameter, GradBuffers]:
    """Bind one parameter to flat buffers of its own."""
    spec = ParamSpec(name, shape, Init("normal", 0.02))
    record = localize(spec, tp=1, tp_index=0, sequence_parallel=False)
    parameter = ShardedParameter(record, DTYPES[precision.dtype])
    alone = Axis("dp", [0], 0, None, Ledger())
    layouts = layout_parameters([record], dp=1, bucket_numel=spec.numel)
    buffers = GradBuffers(layouts, {name: parameter}, precision, device, {"dp": alone}, {"tp": alone})
    return parameter, buffers


def compare(name: str, calls: dict[str, Call], rounds: int, device: torch.device) -> Row:
    """Time the forms in turn; two rounds beforehand compile and warm up."""
    taken = {form: [each.wall for each in times] for form, times in in_turn(calls, rounds, 2, device).items()}
    first, *others = calls
    ratios = {form: median_interval([a / b for a, b in zip(taken[first], taken[form], strict=True)]) for form in others}
    return Row(name, {form: median(times) for form, times in taken.items()}, ratios)


def show(rows: Sequence[Row], console: Console) -> None:
    table = Table(title="forward and backward; an update")
    for heading in ("kernel", "forms", "ms", "times as fast"):
        table.add_column(heading, justify="left" if heading in ("kernel", "forms") else "right")
    for row in rows:
        forms = list(row.seconds)
        table.add_row(
            row.kernel,
            " / ".join(forms),
            " / ".join(f"{seconds * 1e3:.2f}" for seconds in row.seconds.values()),
            ", ".join(str(interval) for interval in row.speedup.values()) or "-",
        )
    console.print(table)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--ffn", type=int, help="MLP width; 4 x hidden if it is not given")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--shard", type=int, default=2**22, help="elements of the optimizer's shard")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/kernels.jsonl"), help="appended to")
    parser.add_argument("--only", help="kernels whose names contain this")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Row]:
    options = parse(argv)
    sizes = Sizes(
        options.tokens,
        options.hidden,
        options.head_dim,
        options.ffn or 4 * options.hidden,
        options.vocab,
        options.shard // options.hidden * options.hidden,
    )
    device = torch.device(options.device)
    rows = [
        compare(name, calls, options.rounds, device)
        for name, calls in kernels(sizes, DTYPES[options.dtype], device)
        if not options.only or options.only in name
    ]
    show(rows, Console())
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    numbers = {"machine": machine() | gpu, "sizes": asdict(sizes), "results": [asdict(row) for row in rows]}
    append_record(options.json, "kernels", argv, numbers)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
