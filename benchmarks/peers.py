"""Steps of ours compared with those of peers, on the same model, tokens and layout, in pairs in one run.

    ranks 0..n-1, each:   build ours, build the peer from the same weights
    pair 1                our step, its step         ratio = its seconds / ours (tokens per second of ours / its)
    pair 2                its step, our step         ...

A step's time is that of the slowest rank. Losses of the two are compared at every step: a difference beyond rounding stops the
run. Memory is the peak of live tensor bytes of a rank over building a side and two steps, as torch's profiler sees it. Bytes
sent are counted below both sides, in the c10d operators that they dispatch: what a ring sends per rank for each, the tensor
itself for a message.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.peers --layout tp=2
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 -m benchmarks.peers --layout tp=2,pp=2 --pairs 15
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.deepspeed_peer import DeepSpeedPeer
from benchmarks.engine_overhead import LEARNING_RATE, Interval, median_interval, traced_peak
from benchmarks.megatron_peer import MegatronPeer
from benchmarks.records import append_record
from benchmarks.torch_peer import TorchPeer
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.config.tree import Config
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.data.loader import Batches, MicroBatch
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.layout.shard_spec import localize
from triaxis.engine.tensor_parallel.initial_weights import initial_box
from triaxis.engine.train import build
from triaxis.launch.rank.join import Rank, join
from triaxis.launch.start.process.ending import run_rank
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import model_specs

WARM_UP_STEPS = 2
LOSS_TOLERANCE = 1e-4
"""Largest relative difference of the losses at any step: fp32's rounding, grown over the steps of a run."""

Step = Callable[[Sequence[MicroBatch]], float]


@dataclass(frozen=True, slots=True)
class Result:
    """One peer in one layout; seconds and bytes are of the slowest and the largest rank."""

    peer: str
    layout: str
    num_parameters: int
    num_pairs: int
    speed_ratio: Interval
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


def config_of(options: argparse.Namespace, layout: Mapping[str, int], *, sequence_parallel: bool) -> Config:
    """A Llama in fp32 in the layout."""
    return Config.model_validate(
        {
            "model": {
                "norm": "rmsnorm",
                "activation": "swiglu",
                "position": "rope",
                "bias": "none",
                "tie_embeddings": False,
                "num_layers": options.layers,
                "hidden_size": options.hidden,
                "num_attention_heads": options.hidden // 64,
                "ffn_hidden_size": round(8 * options.hidden / 3 / 64) * 64,
                "seq_length": options.seq,
                "vocab_size": options.vocab,
            },
            "data": {"synthetic": True},
            "train": {
                "steps": 10**6,
                "global_batch_size": options.microbatches * options.micro_batch_size * layout.get("dp", 1),
                "micro_batch_size": options.micro_batch_size,
                "seed": 1,
            },
            "optimizer": {"lr": LEARNING_RATE},
            "precision": {"dtype": "fp32"},
            "parallel": {**layout, "sequence_parallel": sequence_parallel},
        }
    )


def config_of_layout(options: argparse.Namespace) -> Config:
    """With tp > 1 there is sequence parallelism where the peer has it."""
    layout = layout_of(options.layout)
    return config_of(options, layout, sequence_parallel=layout.get("tp", 1) > 1 and options.peer == "torch")


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
        dataset = SyntheticDataset(1, self.config.model.vocab_size, self.config.model.seq_length)
        coordinates, sizes = self.rank.topology.coordinates, self.rank.topology.sizes
        return Batches(
            dataset,
            global_batch_size=self.config.train.global_batch_size,
            micro_batch_size=self.config.train.micro_batch_size,
            dp=sizes.dp,
            dp_rank=coordinates.dp,
            consumed_samples=0,
            device="cpu",
        )

    def slowest(self, value: float) -> float:
        """The largest of all ranks' values."""
        return float(self.world.all_reduce(torch.tensor([value], dtype=torch.float64), "benchmark", op="max").wait())

    def timed(self, step: Step, microbatches: Sequence[MicroBatch]) -> tuple[float, float]:
        """(loss, seconds of the slowest rank), all ranks beginning together."""
        self.slowest(0.0)
        started = time.perf_counter()
        loss = step(microbatches)
        return loss, self.slowest(time.perf_counter() - started)

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

    def run(self, peer: str, layout: str, num_pairs: int) -> Result:
        """Time `num_pairs` pairs.

        Raises:
            ValueError: on every rank: the losses of the two sides differ by more than rounding.
        """
        peaks = [self.peak(make) for make in self.makers]
        sides = [make(self.config, self.rank) for make in self.makers]
        seconds: list[list[float]] = [[], []]
        largest, batches = 0.0, self.batches()
        for pair in range(-WARM_UP_STEPS, num_pairs):
            microbatches = batches.next_step()
            losses = [0.0, 0.0]
            for side in (0, 1) if pair % 2 == 0 else (1, 0):
                losses[side], taken = self.timed(sides[side], microbatches)
                if pair >= 0:
                    seconds[side].append(taken)
            difference = abs(losses[0] - losses[1]) / abs(losses[1])
            largest = max(largest, difference)
            if not difference <= LOSS_TOLERANCE:
                raise ValueError(
                    f"{peer}, {layout}: losses {losses[0]} (ours) and {losses[1]} differ by {difference:.1e}, more than "
                    f"{LOSS_TOLERANCE}: the two do not train the same, so their times cannot be compared."
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
            num_parameters=sum(spec.numel for spec in model_specs(self.config.model)),
            num_pairs=num_pairs,
            speed_ratio=median_interval([theirs / ours for ours, theirs in zip(*seconds, strict=True)]),
            our_seconds=statistics.median(seconds[0]),
            peer_seconds=statistics.median(seconds[1]),
            our_peak_bytes=int(peaks[0]),
            peer_peak_bytes=int(peaks[1]),
            our_sent_bytes=int(sent[0]),
            peer_sent_bytes=int(sent[1]),
            largest_loss_difference=largest,
        )


def show(result: Result, console: Console) -> None:
    mib = 2**20
    one, other = f"{result.our_seconds:.3f}", f"{result.peer_seconds:.3f}"
    console.print(
        f"{result.peer}, {result.layout}, {result.num_parameters / 1e6:.1f}M parameters, {result.num_pairs} pairs\n"
        f"  tokens per second, ours / peer   {result.speed_ratio}   ({one} and {other} s a step)\n"
        f"  peak of live tensors, largest rank   {result.our_peak_bytes / mib:.0f} and {result.peer_peak_bytes / mib:.0f} MiB\n"
        f"  sent per step, largest rank   {result.our_sent_bytes / mib:.1f} and {result.peer_sent_bytes / mib:.1f} MiB\n"
        f"  losses differ by at most {result.largest_loss_difference:.1e}",
        soft_wrap=True,
    )


def append(path: Path, module: str, num_ranks: int, argv: Sequence[str], result: Result) -> None:
    """Append a line with machine, command and numbers."""
    append_record(path, module, argv, {"result": asdict(result)}, launcher=f"torchrun --nproc-per-node {num_ranks}")


def layout_of(text: str) -> dict[str, int]:
    """tp=2,pp=2 as a mapping."""
    return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}


def add_sizes(
    parser: argparse.ArgumentParser, module: str, *, seq: int, microbatches: int, micro_batch_size: int
) -> None:
    """Add the options of `config_of`, the number of pairs and the file of results."""
    parser.add_argument("--hidden", type=int, default=512, help="hidden size, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--seq", type=int, default=seq, help="tokens per sample")
    parser.add_argument("--vocab", type=int, default=4096, help="vocabulary, a multiple of 128")
    parser.add_argument(
        "--microbatches", type=int, default=microbatches, help="microbatches per step and data-parallel rank"
    )
    parser.add_argument("--micro-batch-size", type=int, default=micro_batch_size, help="samples per microbatch")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of timed steps")
    parser.add_argument("--json", type=Path, default=Path(f"runs/benchmarks/{module}.jsonl"), help="appended to")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Steps of ours compared with a peer's, same model, tokens and layout, in interleaved pairs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--layout", required=True, help="tp=2,pp=2,vpp=2,dp=1,zero=1: as many ranks as torchrun starts")
    parser.add_argument("--peer", choices=list(PEERS), default="torch", help="the program to compare with")
    add_sizes(parser, "peers", seq=256, microbatches=4, micro_batch_size=2)
    options = parser.parse_args(argv)
    if options.peer == "deepspeed" and find_spec("deepspeed") is None:
        parser.error("DeepSpeed is not installed and no dependency of ours: pip install deepspeed, then run this again")
    return options


def main(argv: Sequence[str]) -> int:
    """Run it on every rank; rank 0 prints."""
    options = parse(argv)
    environment = RankEnvironment.from_variables(os.environ)
    config = config_of_layout(options)
    with join(config, environment) as rank:
        result = Contest(config, rank, PEERS[options.peer]).run(options.peer, options.layout, options.pairs)
        if rank.number == 0:
            show(result, Console())
            append(options.json, "peers", environment.world_size, argv, result)
    return 0


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
