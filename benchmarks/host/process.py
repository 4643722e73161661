"""One subject's process: builds it at two depths, then answers each line of its input with a measured step of both.

python -m benchmarks.host.process SUBJECT SHAPE TP EP TOKENS
"""

import gc
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.host.subjects import SUBJECTS, Shape
from tests.cuda_stub.values import library

DEPTHS = (2, 4)
WARM_UP = 3

CALLS = ("kernel", "copy", "fill")
"""What the stub records of a device's work, beside messages and waits."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What one step asks of the card.

    Attributes:
        forward_backward, update: numbers of "kernel", "copy", "fill", "message", "wait" and "allocation".
        peak_bytes: most memory that torch's allocator handed out, building included.
    """

    forward_backward: Mapping[str, int]
    update: Mapping[str, int]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Half:
    """What a half of a step took, in seconds of the clock, and of this process on its processors."""

    wall: float
    cpu: float


def counted(run: Callable[[], object]) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls"
        library().card_log_start()
        run()
        library().card_log_stop(str(path).encode())
        return dict(Counter(line.partition("\t")[0] for line in path.read_text().splitlines()))


def timed(run: Callable[[], object]) -> Half:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Half(time.perf_counter() - wall, time.process_time() - cpu)


def main(name: str, shape: str, *sizes: str) -> None:
    # What libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    library().card_values(0)
    sides, counts, trained = {}, {}, Shape(shape, *map(int, sizes))
    for depth in DEPTHS:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        forward_backward, update = sides[depth] = SUBJECTS[name].build(trained, depth)
        for _ in range(WARM_UP):
            forward_backward()
            update()
        calls = counted(forward_backward), counted(update)
        counts[depth] = asdict(Counted(*calls, torch.cuda.max_memory_allocated() - before))
    print(json.dumps(counts), file=answers, flush=True)
    for line in sys.stdin:
        gc.collect()
        gc.disable()
        halves = {}
        for depth in json.loads(line):
            forward_backward, update = sides[int(depth)]
            # The step before fills the caches of the processor.
            forward_backward()
            update()
            halves[depth] = [asdict(timed(forward_backward)), asdict(timed(update))]
        gc.enable()
        print(json.dumps(halves), file=answers, flush=True)
    # Groups without peers are not closed.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
