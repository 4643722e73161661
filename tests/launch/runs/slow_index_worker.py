"""A rank of a training run whose corpus is large for its time: orders are built in small pieces, each of which takes long."""

import time
from collections.abc import Sequence
from pathlib import Path

import triaxis.launch.pretrain_gpt as worker
from triaxis.engine.data import order_pieces, samples
from triaxis.launch.rank import first_orders
from triaxis.launch.start.process.ending import run_rank

PIECE = 256
PIECE_SECONDS = 0.4


def main(words: Sequence[str]) -> int:
    """Train, slowly where an order is built."""
    order_pieces.PIECE = PIECE
    samples.AHEAD = 1.0  # never: a later epoch too is built where the loader waits for it, under the watch
    first_orders.QUIET_SECONDS = first_orders.SAY_AGAIN_SECONDS = 0.0
    piece = first_orders.OrderProgress.piece

    def slow(progress: first_orders.OrderProgress, path: Path, done: int, of: int) -> None:
        piece(progress, path, done, of)
        time.sleep(PIECE_SECONDS)

    first_orders.OrderProgress.piece = slow  # type: ignore[method-assign]
    return worker.main(words)


if __name__ == "__main__":
    import sys

    run_rank(main, sys.argv[1:])
