"""A rank of a training run over the fake NCCL group of `tests/fake_nccl.py`, of which the last one fails in its second step."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import triaxis.launch.pretrain_gpt as worker
from tests import fake_nccl
from triaxis.engine.run.step_parts import StepWatcher
from triaxis.launch.rank.watchers import Watchers
from triaxis.launch.start.process.ending import run_rank

CULPRIT = 3


class Failing(StepWatcher):
    """A watcher of a rank's steps that runs out of memory in its second one; then closing it takes `closing_seconds`."""

    def __init__(self, closing_seconds: float) -> None:
        self._closing_seconds = closing_seconds
        self._step = 0

    def enter(self, name: str) -> None:
        self._step += name == "data"

    def instruction(self, instruction: object) -> None:
        if self._step == 2 and str(instruction) == "0B1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")

    def close(self) -> None:
        time.sleep(self._closing_seconds)


def fail_on_the_last_rank(rank: int, closing_seconds: float = 0.0) -> None:
    """Put a failing watcher beside those of the worker of this process."""
    if rank != CULPRIT:
        return

    def with_one_more(*args: Any) -> Watchers:
        watchers, failing = Watchers(*args), Failing(closing_seconds)
        watchers.steps.append(failing)
        watchers.observers.append(failing.instruction)
        return watchers

    worker.Watchers = with_one_more


def main(argv: Sequence[str]) -> int:
    fake_nccl.install()
    join = dist.init_process_group
    dist.init_process_group = lambda backend, **named: join(fake_nccl.NAME, **named)
    fail_on_the_last_rank(int(os.environ["RANK"]))
    return worker.main(argv)


if __name__ == "__main__":
    run_rank(main, sys.argv[1:])
