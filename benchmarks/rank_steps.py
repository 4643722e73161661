"""Shared parts of benchmarks of a rank's step: an engine that is built from a config, batches of random tokens, a timed step."""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from triaxis.engine.comm.runtime import RankEnvironment
from triaxis.engine.data.loader import Batches, MicroBatch
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.launch.rank.batches import open_batches
from triaxis.launch.rank.join import Rank, join, read_config
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute

LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Stepping:
    """One rank, ready to make steps."""

    rank: Rank
    engine: Engine
    batches: Batches

    def next_step(self) -> list[MicroBatch]:
        return self.batches.next_step()


@dataclass(frozen=True, slots=True)
class Seconds:
    """Duration of a step: wall time, CPU time of the main thread, CPU time of all threads of this process."""

    wall: float
    main_thread: float
    process: float


def timed(step: Callable[[], object]) -> Seconds:
    """Make a step."""
    wall, main, process = time.perf_counter(), time.thread_time(), time.process_time()
    step()
    return Seconds(time.perf_counter() - wall, time.thread_time() - main, time.process_time() - process)


def parser_of(module: str, description: str) -> argparse.ArgumentParser:
    """For the command line of a benchmark that `torchrun` starts, with the config as its first words."""
    parser = argparse.ArgumentParser(
        prog=f"torchrun --nproc-per-node N -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("config", nargs="+", help="config.yaml, then section.key=value")
    return parser


@contextmanager
def ready(words: Sequence[str]) -> Iterator[Stepping]:
    """Join the other ranks and build the engine of `[config.yaml, section.key=value ...]`."""
    environment = RankEnvironment.from_variables(os.environ)
    config = read_config(words, environment)
    with join(config, environment) as rank:
        engine = build(resolve_recompute(config, rank.topology.sizes), rank.topology, build_chunks)
        model = config.model
        dataset = SyntheticDataset(config.train.seed, model.vocab_size, model.seq_length)
        batches = open_batches(config, rank.topology, dataset)
        try:
            yield Stepping(rank, engine, batches)
        finally:
            batches.close()
