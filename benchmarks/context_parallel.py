"""Ours with context parallelism next to ours with tensor and sequence parallelism, and to plain PyTorch, in pairs in one run.

    ours     parallel.cp = n: each rank has 1/n of every sample's tokens, and gathers keys and values
    tp       parallel.tp = n with sequence parallelism, on the same ranks
    plain    `plain_context_parallel.py`: whole parameters, two pieces of each sample, an all-gather, torch's attention

Same model, weights, samples and losses. Each side is given whole samples, and takes its part of them within its step. How pairs are
timed is in `peers.py`.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.context_parallel
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from benchmarks.peers import LEARNING_RATE, Contest, Step, add_sizes, append, config_of, make_ours, show, whole_weights
from benchmarks.plain_context_parallel import PlainContextParallel
from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.plan import parallel_sizes, rank_grid
from triaxis.engine.config.section import with_value
from triaxis.engine.config.tree import Config
from triaxis.launch.rank.join import Rank, join
from triaxis.launch.start.process.ending import run_rank


def make_plain(config: Config, rank: Rank) -> Step:
    plain = PlainContextParallel(config, whole_weights(config))
    return lambda microbatches: plain.step(microbatches, LEARNING_RATE)[0]


def peers_of(by_tp: Config, rank: Rank) -> Mapping[str, Callable[[Config, Rank], Step]]:
    """Return what makes each other side; groups for tp are made here, once."""
    grid = rank_grid(by_tp, parallel_sizes(by_tp))
    topology = Topology(grid, rank.number, rank.topology.device, kv_heads=by_tp.model.kv_heads)
    return {
        "ours with tp and sequence parallelism": lambda _, rank: make_ours(by_tp, replace(rank, topology=topology)),
        "plain PyTorch": make_plain,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m benchmarks.context_parallel",
        description="Steps of ours with cp = N, in pairs with tp = N and with plain PyTorch.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--kv-heads", type=int, default=2, help="key/value heads")
    add_sizes(parser, "context_parallel", seq=2048, microbatches=2, micro_batch_size=1)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run it on every rank; rank 0 prints."""
    options = parse(argv)
    environment = RankEnvironment.from_variables(os.environ)
    n = environment.world_size
    by_cp, by_tp = (
        with_value(config_of(options, layout, sequence_parallel="tp" in layout), "model.num_kv_heads", options.kv_heads)
        for layout in ({"cp": n, "dp": 1}, {"tp": n, "dp": 1})
    )
    with join(by_cp, environment) as rank:
        for name, make in peers_of(by_tp, rank).items():
            result = Contest(by_cp, rank, make).run(name, f"cp={n}", options.pairs)
            if rank.number == 0:
                show(result, Console())
                append(options.json, "context_parallel", n, argv, result)
    return 0


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
