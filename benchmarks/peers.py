"""Steps of ours compared with those of peers, on the same model, tokens and layout, in pairs in one run.

    ranks 0..n-1, each:   build ours, build the peer from the same weights
    pair 1                our step, its step         ratio = its seconds / ours (tokens per second of ours / its)
    pair 2                its step, our step         ...

    plain                 `plain_gpt.py`, a loop by hand: one rank, or with cp `plain_context_parallel.py`
    tp                    ours too, on ranks of tp instead of cp, with sequence parallelism
    torch, megatron-core, deepspeed     other programs; a Llama in fp32

A step's time is that of the slowest rank. A machine that others use too slows both members of a pair; CPU seconds count only what
the processes ran. Losses of the two are compared at every step: a difference beyond rounding stops the run. Memory is the peak of
live tensor bytes of a rank over building a side and two steps, as torch's profiler sees it. Bytes sent are counted below both
sides, in the c10d operators that they dispatch: what a ring sends per rank for each, the tensor itself for a message.

    OMP_NUM_THREADS=1 python -m benchmarks.peers --peer plain --model gpt --dtype bf16
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.peers --peer torch --layout tp=2
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.peers --peer plain --layout cp=2 --kv-heads 2 \\
        --seq 2048 --microbatches 2 --micro-batch-size 1
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.deepspeed_peer import DeepSpeedPeer
from benchmarks.megatron_peer import MegatronPeer
from benchmarks.models import DTYPES, LEARNING_RATE, MODELS, add_sizes, batches_of, config_of
from benchmarks.pairs import Interval, median_interval
from benchmarks.plain_context_parallel import PlainContextParallel
from benchmarks.plain_gpt import PlainLoop
from benchmarks.records import append_record
from benchmarks.torch_peer import TorchPeer
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes, rank_grid
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.data.loader import Batches, MicroBatch
from triaxis.engine.layout.shard_spec import localize
from triaxis.engine.tensor_parallel.initial_weights import initial_box
from triaxis.engine.train import build
from triaxis.launch.rank.join import Rank, join
from triaxis.launch.start.process.ending import run_rank
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import model_specs

WARM_UP_STEPS = 2
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of the losses at any step: rounding, grown over the steps of a run."""

Step = Callable[[Sequence[MicroBatch]], float]


@dataclass(frozen=True, slots=True)
class Result:
    """One peer in one layout; seconds and bytes are of the slowest and the largest rank."""

    peer: str
    layout: str
    model: str
    dtype: str
    num_parameters: int
    num_pairs: int
    speed_ratio: Interval
    cpu_ratio: Interval
    our_seconds: float
    peer_seconds: float
    our_peak_bytes: int
    peer_peak_bytes: int
    our_sent_bytes: int
    peer_sent_bytes: int
    largest_loss_difference: float


RING_FACTORS: Mapping[str, float] = {
    "broadcast_": 1.0,
    "allreduce_": 2.0,
    "all_reduce": 2.0,
    "all_reduce_": 2.0,
    "allgather_": 1.0,
    "_allgather_base_": 1.0,
    "all_gather_into_tensor": 1.0,
    "_reduce_scatter_base_": 1.0,
    "reduce_scatter_tensor": 1.0,
    "reduce_scatter_tensor_coalesced_": 1.0,
    "allgather_into_tensor_coalesced_": 1.0,
    "alltoall_base_": 1.0,
    "all_to_all_single": 1.0,
}
"""A ring of n ranks sends this times (n - 1) / n of the whole tensor, per rank."""

SENDS_NOTHING = {"wait_tensor", "_wrap_tensor_autograd", "recv_", "barrier", "monitored_barrier_"}


class SentBytes(TorchDispatchMode):
    """Bytes that this rank sends in the collectives and messages that are dispatched below it, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[1].split(".")[0]
            if name not in SENDS_NOTHING:
                self.sent[name] += self._bytes(name, args)
        return func(*args, **(kwargs or {}))

    def _bytes(self, name: str, args: Sequence[Any]) -> int:
        # Inputs or outputs, whichever are the whole; a coalesced call has several of each.
        largest = max(
            sum(value.nbytes for value in tree_iter(argument) if isinstance(value, torch.Tensor)) for argument in args
        )
        if name == "send":
            return largest
        size = group_size(name, args)
        # The functional gather is given the shard alone; the others see the whole.
        whole = largest * size if name == "all_gather_into_tensor" else largest
        return round(RING_FACTORS[name] * (size - 1) / size * whole)


def group_size(name: str, args: Sequence[Any]) -> int:
    """Ranks of the group that a c10d operator was called with, as an object or by its name."""
    for value in reversed(args):
        if isinstance(value, str) and value not in ("sum", "avg", "max", "min"):
            return dist.distributed_c10d._resolve_process_group(value).size()
        if isinstance(value, dist.ProcessGroup):
            return value.size()
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value).size()
    raise ValueError(f"{name}: no process group among its arguments")


def config_of_layout(options: argparse.Namespace) -> Config:
    """With tp > 1 there is sequence parallelism where the peer has it."""
    layout = layout_of(options.layout)
    has_sequence_parallelism = layout.get("tp", 1) > 1 and options.peer == "torch"
    return config_of(options, options.model, options.dtype, layout | {"sequence_parallel": has_sequence_parallelism})


def whole_weights(config: Config) -> dict[str, torch.Tensor]:
    """The initial weights of the whole model by name, in their logical shapes: what ours start from in any layout."""
    weights = {}
    for spec in model_specs(config.model):
        record = localize(spec, tp=1, tp_index=0, sequence_parallel=False)
        weights[spec.name] = initial_box(record, config.train.seed).view(spec.shape)
    return weights


def make_ours(config: Config, rank: Rank) -> Step:
    topology = rank.topology
    engine, cut = (
        build(resolve_recompute(config, topology.sizes), topology, build_chunks),
        ContextCut.of(config, topology.sizes, topology.coordinates.cp),
    )

    def step(microbatches: Sequence[MicroBatch]) -> float:
        loss = engine.train_step([cut(one) for one in microbatches], LEARNING_RATE).loss
        # Else parameters would be gathered under the peer's step, and while the profiler ends.
        engine.buffers.wait_all()
        return loss

    return step


def make_by_tp(config: Config, rank: Rank) -> Step:
    parallel = config.parallel.model_copy(update={"tp": config.parallel.cp, "cp": 1, "sequence_parallel": True})
    config = with_value(config, "parallel", parallel)
    grid = rank_grid(config, parallel_sizes(config))
    topology = Topology(grid, rank.number, rank.topology.device, kv_heads=config.model.kv_heads)
    return make_ours(config, replace(rank, topology=topology))


def make_plain(config: Config, rank: Rank) -> Step:
    kind = PlainContextParallel if config.parallel.cp > 1 else PlainLoop
    loop = kind(config, whole_weights(config))
    return lambda microbatches: loop.step(microbatches, LEARNING_RATE)[0]


def make_torch(config: Config, rank: Rank) -> Step:
    peer = TorchPeer(config, rank.topology.sizes, whole_weights(config))

    def step(microbatches: Sequence[MicroBatch]) -> float:
        tokens = torch.cat([microbatch.tokens for microbatch in microbatches])
        labels = torch.cat([microbatch.labels for microbatch in microbatches])
        return peer.step(tokens, labels, LEARNING_RATE)

    return step


def make_megatron(config: Config, rank: Rank) -> Step:
    return MegatronPeer(config, rank.topology.sizes, whole_weights(config)).step


def make_deepspeed(config: Config, rank: Rank) -> Step:
    return DeepSpeedPeer(config, rank.topology.sizes, whole_weights(config)).step


PEERS: Mapping[str, Callable[[Config, Rank], Step]] = {
    "plain": make_plain,
    "tp": make_by_tp,
    "torch": make_torch,
    "megatron-core": make_megatron,
    "deepspeed": make_deepspeed,
}


class Contest:
    """Ours and one peer on the ranks of one run."""

    def __init__(self, config: Config, rank: Rank, make_peer: Callable[[Config, Rank], Step]) -> None:
        self.config, self.rank = config, rank
        self.world = rank.topology.axis("world")
        self.makers = (make_ours, make_peer)

    def batches(self) -> Batches:
        topology = self.rank.topology
        return batches_of(self.config, topology.sizes.dp, topology.coordinates.dp)

    def slowest(self, value: float) -> float:
        """The largest of all ranks' values."""
        return float(self.world.all_reduce(torch.tensor([value], dtype=torch.float64), "benchmark", op="max").wait())

    def timed(self, step: Step, microbatches: Sequence[MicroBatch]) -> tuple[float, float, float]:
        """(loss, seconds of the slowest rank, CPU seconds of the busiest), all ranks beginning together."""
        self.slowest(0.0)
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step(microbatches)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return loss, self.slowest(wall), self.slowest(cpu)

    def peak(self, make: Callable[[Config, Rank], Step]) -> float:
        """Most live bytes on the largest rank from building a side to its second step."""
        batches = self.batches()

        def run() -> None:
            step = make(self.config, self.rank)
            for _ in range(2):
                step(batches.next_step())

        gc.collect()
        peak = traced_peak(run)
        batches.close()
        return self.slowest(peak)

    def run(self, peer: str, layout: str, model: str, num_pairs: int) -> Result:
        """Time `num_pairs` pairs.

        Raises:
            ValueError: on every rank: the losses of the two sides differ by more than rounding.
        """
        peaks = [self.peak(make) for make in self.makers]
        sides = [make(self.config, self.rank) for make in self.makers]
        seconds: list[list[float]] = [[], []]
        cpu_seconds: list[list[float]] = [[], []]
        largest, batches, dtype = 0.0, self.batches(), self.config.precision.dtype
        for pair in range(-WARM_UP_STEPS, num_pairs):
            microbatches = batches.next_step()
            losses = [0.0, 0.0]
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                losses[side], wall, cpu = self.timed(sides[side], microbatches)
                if pair >= 0:
                    seconds[side].append(wall)
                    cpu_seconds[side].append(cpu)
            difference = abs(losses[0] - losses[1]) / abs(losses[1])
            largest = max(largest, difference)
            if not difference <= LOSS_TOLERANCE[dtype]:
                raise ValueError(
                    f"{peer}, {layout}: losses {losses[0]} (ours) and {losses[1]} differ by {difference:.1e}, more than "
                    f"{LOSS_TOLERANCE[dtype]}: the two do not train the same, so their times cannot be compared."
                )
        sent = []
        for side in sides:
            with SentBytes() as counter:
                side(batches.next_step())
            sent.append(self.slowest(sum(counter.sent.values())))
        batches.close()
        return Result(
            peer=peer,
            layout=layout,
            model=model,
            dtype=dtype,
            num_parameters=sum(spec.numel for spec in model_specs(self.config.model)),
            num_pairs=num_pairs,
            speed_ratio=median_interval([theirs / ours for ours, theirs in zip(*seconds, strict=True)]),
            cpu_ratio=median_interval([theirs / ours for ours, theirs in zip(*cpu_seconds, strict=True)]),
            our_seconds=statistics.median(seconds[0]),
            peer_seconds=statistics.median(seconds[1]),
            our_peak_bytes=int(peaks[0]),
            peer_peak_bytes=int(peaks[1]),
            our_sent_bytes=int(sent[0]),
            peer_sent_bytes=int(sent[1]),
            largest_loss_difference=largest,
        )


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


def show(result: Result, console: Console) -> None:
    mib = 2**20
    one, other = f"{result.our_seconds:.3f}", f"{result.peer_seconds:.3f}"
    memory = f"{result.our_peak_bytes / mib:.0f} and {result.peer_peak_bytes / mib:.0f} MiB"
    console.print(
        f"{result.peer}, {result.layout}, {result.model} {result.dtype}, {result.num_parameters / 1e6:.1f}M parameters, "
        f"{result.num_pairs} pairs\n"
        f"  tokens per second, ours / peer   {result.speed_ratio}   ({one} and {other} s a step)\n"
        f"  tokens per CPU second, ours / peer   {result.cpu_ratio}\n"
        f"  peak of live tensors, largest rank   {result.our_peak_bytes / result.peer_peak_bytes:.3f}   ({memory})\n"
        f"  sent per step, largest rank   {result.our_sent_bytes / mib:.1f} and {result.peer_sent_bytes / mib:.1f} MiB\n"
        f"  losses differ by at most {result.largest_loss_difference:.1e}",
        soft_wrap=True,
    )


def layout_of(text: str) -> dict[str, int]:
    """tp=2,pp=2 as a mapping."""
    return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Steps of ours compared with a peer's, same model, tokens and layout, in interleaved pairs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--layout", default="dp=1", help="tp=2,pp=2,vpp=2,dp=1,zero=1: as many ranks as torchrun starts"
    )
    parser.add_argument("--peer", choices=list(PEERS), default="torch", help="the program to compare with")
    parser.add_argument("--model", choices=list(MODELS), default="llama", help="gpt: beside plain alone")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="bf16: beside plain alone")
    add_sizes(parser)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of timed steps")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/peers.jsonl"), help="appended to")
    options = parser.parse_args(argv)
    layout = layout_of(options.layout)
    if options.peer == "deepspeed" and find_spec("deepspeed") is None:
        parser.error("DeepSpeed is not installed and no dependency of ours: pip install deepspeed, then run this again")
    if options.peer == "plain" and any(layout.get(axis, 1) > 1 for axis in ("tp", "pp", "dp")):
        parser.error(f"--layout {options.layout}: plain has no parallelism but cp: give cp=N, or another --peer")
    if options.peer != "plain" and (options.model, options.dtype) != ("llama", "fp32"):
        parser.error(f"--model {options.model} --dtype {options.dtype}: peers but plain train a Llama in fp32")
    return options


def main(argv: Sequence[str]) -> int:
    """Run it on every rank; rank 0 prints, and appends a line with machine, command and numbers."""
    options = parse(argv)
    environment = RankEnvironment.from_variables(os.environ)
    config = config_of_layout(options)
    with join(config, environment) as rank:
        contest = Contest(config, rank, PEERS[options.peer])
        result = contest.run(options.peer, options.layout, options.model, options.pairs)
        if rank.number == 0:
            show(result, Console())
            launcher = f"torchrun --nproc-per-node {environment.world_size}"
            append_record(options.json, "peers", argv, {"result": asdict(result)}, launcher)
    return 0


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
