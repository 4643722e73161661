"""The training loop of every contender but ours: our data, a line of JSON per step, losses read one step behind.

    post step i  ->  read the loss of step i - 1  ->  the clock        a step's time: from one reading to the next

Our loop reads one step behind too: the GPU always has work, and no contender pays for a wait that training does not need.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from benchmarks.gpu_contenders.ceiling import synchronize
from benchmarks.gpu_contenders.records import Job
from triaxis.engine.config.tree import Config
from triaxis.engine.data.corpus.indexed import IndexedWriter, smallest_dtype
from triaxis.engine.data.datasets import open_datasets
from triaxis.engine.data.loader import Batches, MicroBatch
from triaxis.engine.device.host_copy import HostCopy
from triaxis.engine.telemetry.record.jsonl import JsonLines

DOCUMENT_TOKENS = 2**16


class Trainer(Protocol):
    def step(self, microbatches: Sequence[MicroBatch]) -> torch.Tensor:
        """One optimizer step; the loss per token, a scalar on the device, not waited for."""
        ...


def write_corpus(folder: Path, job: Job) -> Path:
    """Write random tokens for as many steps as the job has, as a `.bin/.idx` pair; return its prefix."""
    model, prefix = job.model, folder / "random"
    num_steps = job.warm_up + job.steps + job.traced + 1
    num_tokens = num_steps * job.sizes.samples_per_step * model.seq_length + 1
    generator = np.random.default_rng(1)
    with IndexedWriter(prefix, smallest_dtype(model.vocab_size)) as writer:
        for start in range(0, num_tokens, DOCUMENT_TOKENS):
            writer.add_document(generator.integers(model.vocab_size, size=min(DOCUMENT_TOKENS, num_tokens - start)))
    return prefix


def open_batches(config: Config, device: torch.device) -> Batches:
    """Open the batches that ours would read."""
    data = open_datasets(config.data, config.model.seq_length, config.train.seed, vocab_size=config.model.vocab_size)
    return Batches(
        data.train,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp=1,
        dp_rank=0,
        consumed_samples=0,
        device=device,
    )


def train(trainer: Trainer, config: Config, job: Job, folder: Path) -> tuple[list[float], list[float]]:
    """Return (seconds of each timed step, loss of every step)."""
    device = torch.device(job.device)
    batches, log = open_batches(config, device), JsonLines(folder / "metrics.jsonl")
    seconds: list[float] = []
    losses: list[float] = []
    posted: HostCopy | None = None
    synchronize(device)
    before = time.perf_counter()
    try:
        for step in range(job.warm_up + job.steps + 1):
            loss = HostCopy(trainer.step(batches.next_step()).detach().view(1))
            if posted is not None:
                losses += posted.wait()
            posted = loss
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
            log.write({"step": step, "seconds": seconds[-1], "loss": losses[-1] if losses else None})
        assert posted is not None, "at least one step"
        losses += posted.wait()
    finally:
        batches.close()
        log.close()
    return seconds[job.warm_up : job.warm_up + job.steps], losses


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the most that torch's allocator had handed out since its last reset; a CPU's does not count."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def read_lines(path: Path) -> list[dict[str, object]]:
    """Read the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
