"""Cost of the engine itself: one process of ours against a loop written by hand, same arithmetic, in pairs.

    pair 1   engine step, plain step        ratio = engine / plain, wall and CPU seconds
    pair 2   plain step, engine step        ...
    ...
    result   median of the ratios, with the interval that holds it with 95 % probability

The engine runs as always, with every axis of size one: layouts, schedule, executor, flat buffers, distributed optimizer.
The plain loop is `plain_gpt.py`. Both take the same weights and the same microbatches, and their losses are compared: a
difference beyond rounding is an error. A machine that others use too slows both members of a pair, so ratios are
reported; CPU seconds count only what this process ran.

Memory is the peak of live tensor bytes over building a side and two steps, as torch's profiler sees each allocation.

    python -m benchmarks.engine_overhead
    python -m benchmarks.engine_overhead --hidden 256 --layers 2 --pairs 5 --models llama --dtypes bf16
"""

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.plain_gpt import PlainLoop
from benchmarks.records import append_record
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import Batches, MicroBatch
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.launch.start.process.ending import end
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

LEARNING_RATE = 1e-3
WARM_UP_STEPS = 2
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of the two losses at any step: rounding, grown over the steps of a run."""

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"norm": "layernorm", "activation": "gelu", "position": "learned", "bias": "all", "tie_embeddings": True},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "position": "rope", "bias": "none", "tie_embeddings": False},
}

Step = Callable[[Sequence[MicroBatch]], float]
"""Runs one optimizer step and returns the loss per token."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and the order statistics that hold the true median with at least 95 % probability."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Result:
    """One model in one dtype; ratios are engine / plain, seconds and bytes are per side (medians, peaks)."""

    model: str
    dtype: str
    num_parameters: int
    num_pairs: int
    wall_ratio: Interval
    cpu_ratio: Interval
    engine_wall_seconds: float
    plain_wall_seconds: float
    engine_cpu_seconds: float
    plain_cpu_seconds: float
    engine_peak_bytes: int
    plain_peak_bytes: int
    largest_loss_difference: float

    @property
    def memory_ratio(self) -> float:
        return self.engine_peak_bytes / self.plain_peak_bytes


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the median of independent values with a distribution-free interval.

    The number of values below the true median is binomial(n, 1/2), so the k-th smallest and k-th largest hold it with
    probability 1 - 2 P(fewer than k below); k is the largest that keeps `confidence` (all values when n is small).
    """
    ordered, n = sorted(values), len(values)
    k, tail = 0, 0.0
    while k < n // 2 and tail + math.comb(n, k) / 2**n <= (1 - confidence) / 2:
        tail += math.comb(n, k) / 2**n
        k += 1
    k = max(k, 1)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[n - k])


def config_of(options: argparse.Namespace, model: str, dtype: str) -> Config:
    """Build the configuration of one comparison."""
    shape = MODELS[model]
    # SwiGLU has three matrices; 8/3 h, rounded to 64, keeps the size of an MLP of two matrices and 4 h.
    ffn = round(8 * options.hidden / 3 / 64) * 64 if shape["activation"] == "swiglu" else 4 * options.hidden
    return Config.model_validate(
        {
            "model": {
                **shape,
                "num_layers": options.layers,
                "hidden_size": options.hidden,
                "num_attention_heads": options.hidden // options.head_dim,
                "ffn_hidden_size": ffn,
                "seq_length": options.seq,
                "vocab_size": options.vocab,
            },
            "data": {"synthetic": True},
            "train": {
                "steps": 10**6,
                "global_batch_size": options.microbatches * options.micro_batch_size,
                "micro_batch_size": options.micro_batch_size,
                "seed": 1,
            },
            "optimizer": {"lr": LEARNING_RATE},
            "precision": {"dtype": dtype},
        }
    )


def build_engine(config: Config) -> Engine:
    """Build the engine of a lone process."""
    topology = Topology(
        RankGrid(ParallelSizes()),
        0,
        torch.device("cpu"),
        kv_heads=config.model.kv_heads,
        has_experts=config.model.has_experts,
    )
    return build(resolve_recompute(config, topology.sizes), topology, build_chunks)


def engine_step(engine: Engine) -> Step:
    return lambda microbatches: engine.train_step(microbatches, LEARNING_RATE).loss


def plain_step(config: Config, engine: Engine) -> Step:
    """Build a plain loop that starts from the engine's present weights."""
    loop = PlainLoop(config, {name: parameter.value.detach() for name, parameter in engine.parameters.items()})
    return lambda microbatches: loop.step(microbatches, LEARNING_RATE)[0]


def batches_of(config: Config) -> Batches:
    return Batches(
        SyntheticDataset(1, config.model.vocab_size, config.model.seq_length),
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp=1,
        dp_rank=0,
        consumed_samples=0,
        device="cpu",
    )


def compare(config: Config, model: str, num_pairs: int) -> Result:
    """Time `num_pairs` pairs of steps, and measure the memory of both sides.

    Raises:
        ValueError: the losses of the two sides differ by more than rounding.
    """
    dtype = config.precision.dtype
    engine = build_engine(config)
    sides = [engine_step(engine), plain_step(config, engine)]
    wall: list[list[float]] = [[], []]
    cpu: list[list[float]] = [[], []]
    largest = 0.0
    batches = batches_of(config)
    for pair in range(-WARM_UP_STEPS, num_pairs):
        microbatches = batches.next_step()
        losses = [0.0, 0.0]
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            losses[side] = sides[side](microbatches)
            wall_seconds, cpu_seconds = time.perf_counter() - wall_start, time.process_time() - cpu_start
            if pair >= 0:
                wall[side].append(wall_seconds)
                cpu[side].append(cpu_seconds)
        difference = abs(losses[0] - losses[1]) / abs(losses[1])
        largest = max(largest, difference)
        if not difference <= LOSS_TOLERANCE[dtype]:
            raise ValueError(
                f"{model} {dtype}: losses {losses[0]} (engine) and {losses[1]} (plain) differ by {difference:.1e}, more than "
                f"{LOSS_TOLERANCE[dtype]}: the two sides do not compute the same, so their times cannot be compared."
            )
    batches.close()

    def plain_from_scratch() -> Step:
        # The engine that hands over its weights is no part of the plain side: it existed before the measurement.
        return plain_step(config, engine)

    return Result(
        model=model,
        dtype=dtype,
        num_parameters=sum(parameter.record.numel for parameter in engine.parameters.values()),
        num_pairs=num_pairs,
        wall_ratio=median_interval([a / b for a, b in zip(*wall, strict=True)]),
        cpu_ratio=median_interval([a / b for a, b in zip(*cpu, strict=True)]),
        engine_wall_seconds=statistics.median(wall[0]),
        plain_wall_seconds=statistics.median(wall[1]),
        engine_cpu_seconds=statistics.median(cpu[0]),
        plain_cpu_seconds=statistics.median(cpu[1]),
        engine_peak_bytes=peak_bytes(lambda: engine_step(build_engine(config)), config),
        plain_peak_bytes=peak_bytes(plain_from_scratch, config),
        largest_loss_difference=largest,
    )


def peak_bytes(make_side: Callable[[], Step], config: Config) -> int:
    """Return the most live bytes from building a side to its second step."""
    batches = batches_of(config)

    def run() -> None:
        step = make_side()
        for _ in range(2):
            step(batches.next_step())

    gc.collect()
    peak = traced_peak(run)
    batches.close()
    return peak


def traced_peak(run: Callable[[], None]) -> int:
    """Return the most live bytes that torch's CPU allocator had handed out at once during `run`, without those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    # The allocator's count goes on from one profile to the next: what it was before the first event is not ours.
    before = changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"]
    return max(event["args"]["Total Allocated"] for event in changes) - before


def show(results: Sequence[Result], console: Console) -> None:
    """Print the table for people."""
    table = Table(caption="engine / plain: medians with 95 % intervals; peaks of memory")
    for heading in ("model", "wall time", "CPU time", "memory"):
        table.add_column(heading, justify="left" if heading == "model" else "right", no_wrap=True)
    for result in results:
        table.add_row(
            f"{result.model} {result.dtype}",
            str(result.wall_ratio),
            str(result.cpu_ratio),
            f"{result.memory_ratio:.3f}",
        )
    console.print(table)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `config_of`: the sizes of the model and of a step, models, dtypes."""
    parser.add_argument("--hidden", type=int, default=512, help="hidden size")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--head-dim", type=int, default=64, help="size of one attention head")
    parser.add_argument("--seq", type=int, default=256, help="tokens per sample")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary, a multiple of 128")
    parser.add_argument("--microbatches", type=int, default=4, help="microbatches per step")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="samples per microbatch")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which models")
    parser.add_argument("--dtypes", nargs="+", choices=list(LOSS_TOLERANCE), default=list(LOSS_TOLERANCE), help="which")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_overhead",
        description="Steps of the engine on one process against a plain PyTorch loop, in interleaved pairs.",
        epilog="example: python -m benchmarks.engine_overhead --hidden 256 --models llama --dtypes bf16",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of timed steps")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch computes with")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/engine_overhead.jsonl"), help="appended to")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> list[Result]:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    console = Console()
    results = []
    for model in options.models:
        for dtype in options.dtypes:
            result = compare(config_of(options, model, dtype), model, options.pairs)
            results.append(result)
            console.print(
                f"{model} {dtype}, {result.num_parameters / 1e6:.1f}M parameters, {options.pairs} pairs: "
                f"engine {result.engine_cpu_seconds:.3f} CPU s a step and {result.engine_peak_bytes / 2**20:.0f} MiB, "
                f"plain {result.plain_cpu_seconds:.3f} and {result.plain_peak_bytes / 2**20:.0f}",
                soft_wrap=True,
            )
    show(results, console)
    numbers = [asdict(result) | {"memory_ratio": result.memory_ratio} for result in results]
    append_record(options.json, "engine_overhead", argv, {"results": numbers})
    console.print(f"appended to {options.json}")
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
    # torch's profiler leaves a thread, whose destruction at the interpreter's end may abort the process.
    end(0)
