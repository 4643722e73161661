"""Run one rank of `triaxis doctor`, which joins as for training, collects facts and measures."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from triaxis.engine.comm.texts import gather_text
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.tree import Config
from triaxis.engine.device.gpus import GLOO, NCCL
from triaxis.engine.errors import ExitCode
from triaxis.engine.numerics.precision import DTYPES
from triaxis.launch.doctor.facts import collect
from triaxis.launch.doctor.judge import judge, worst
from triaxis.launch.doctor.measure import (
    PATIENCE_SECONDS,
    check_folders,
    gather_rates,
    group_rates,
    measure_clock,
    path_rates,
)
from triaxis.launch.doctor.phases import node_paths
from triaxis.launch.doctor.plan import NODE_PATH_BYTES, data_files, folders, message_sizes, needs
from triaxis.launch.doctor.rates import all_equal, best
from triaxis.launch.doctor.records import Examination, Finding, Level, RankFacts, Size
from triaxis.launch.doctor.report import WIDTH, as_json, show
from triaxis.launch.rank.join import join_run

JSON_FLAG = "--json"
OUTPUT_FLAG = "--output="

MOST_MEASUREMENTS = 3
"""Most measurements of the rates, which are repeated while one is slow: a broken link stays slow, a disturbed one does not."""


def main(argv: Sequence[str]) -> int:
    """Run this rank of `triaxis doctor`. Every rank returns the same exit code.

    Args:
        argv: `[config.yaml, section.key=value ..., --json, --output=FILE]`.
    """
    with join_run([word for word in argv if not word.startswith((JSON_FLAG, OUTPUT_FLAG))]) as rank:
        seen = examine(rank.topology, rank.config)
        findings = judge(seen)
        if rank.number == 0:
            report(argv, rank.topology, seen, findings)
        # No rank leaves before rank 0 has printed, because a launcher ends all ranks when one exits with a nonzero code.
        rank.topology.axis("world").barrier(rank.topology.device, "doctor")
    return ExitCode.OUT_OF_LINE if worst(findings) is Level.FAIL else 0


def report(argv: Sequence[str], topology: Topology, seen: Examination, findings: Sequence[Finding]) -> None:
    text = json.dumps(as_json(topology.grid, seen, findings), indent=2)
    for word in argv:
        if word.startswith(OUTPUT_FLAG):
            Path(word.removeprefix(OUTPUT_FLAG)).write_text(f"{text}\n")
    if JSON_FLAG in argv:
        # `sys.stdout` is redirected if a launcher runs the command in its own process.
        print(text, file=sys.__stdout__, flush=True)
        return
    show(
        Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH),
        topology.grid,
        seen,
        findings,
    )
    sys.stdout.flush()


def examine(
    topology: Topology,
    config: Config,
    roots: Mapping[str, Path] | None = None,
    clock: Callable[[], float] = time.time,
    patience_seconds: float = PATIENCE_SECONDS,
    most_measurements: int = MOST_MEASUREMENTS,
    path_bytes: int = NODE_PATH_BYTES,
) -> Examination:
    """Collect all ranks' facts and measure all rates, with the same result on every rank. All ranks call it.

    Args:
        roots: folders to check; None: the config's.
        clock: function () -> this node's time in seconds.
        patience_seconds: time limit for another node's file to appear.
        most_measurements: limit on measurements, which are repeated while a rate is slow.
        path_bytes: message size from node to node.
    """
    grid, rank, device = topology.grid, topology.rank, topology.device
    world = topology.axis("world")
    seen_roots = check_folders(topology, folders(config) if roots is None else roots, patience_seconds)
    mine = collect(
        rank,
        grid.node(rank),
        device,
        dtype=DTYPES[config.precision.dtype],
        data_files=data_files(config),
        first_of_node=rank % grid.ranks_per_node == 0,
    )
    mine = replace(mine, roots=seen_roots, clock=measure_clock(topology, clock))
    texts = gather_text(world, json.dumps(asdict(mine)), device, "doctor", most_bytes=None)
    facts = tuple(RankFacts.from_json(json.loads(text)) for text in texts)

    backend = NCCL if device.type == "cuda" and not topology.staged else GLOO
    seen = Examination(needs(config, backend), facts, tp_groups=grid.groups("tp"))
    sizes = message_sizes(config, topology.sizes)
    for _ in range(most_measurements):
        rates = group_rates(topology, sizes, DTYPES[config.precision.dtype])
        path = Size("world", "send", path_bytes, 0)
        between = path_rates(world, node_paths(grid.ranks_per_node, grid.world_size), path, device)
        seen = replace(
            seen,
            groups=best(seen.groups, gather_rates(world, rates, device)),
            paths=best(seen.paths, gather_rates(world, between, device)),
        )
        if all_equal(seen):
            break
    topology.ledger.reset()
    return seen
