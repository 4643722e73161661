"""Distributes a row's tokens to context-parallel ranks, balanced by attention work.

A causal query sees all earlier keys, so most attention work is in a row's later half. A row with s tokens is cut into equal blocks.
The heaviest block is dealt first, to the least loaded rank that still has room (longest processing time first, Graham 1969). Each
of the c ranks gets s/c tokens.

A row with one document has 2 c blocks. Rank r gets blocks r and 2 c - 1 - r, an exact balance (2407.21783, section 3.3.2). A row
with several documents has more and smaller blocks.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from triaxis.engine.config.schema.model import ModelConfig

BLOCKS_OF_ONE = 2
"""Blocks per rank in a row with one document."""

BLOCKS_OF_SEVERAL = 8
"""Blocks per rank in a row with several documents; fewer, but an even number, if s/c is no multiple of 8."""

Windows = Mapping[int | None, int]
"""Layer count by attention window in keys; None stands for full attention (`LayerKind.window`)."""


def windows_of(model: ModelConfig) -> Windows:
    """Count a model's layers by attention window (None: no window)."""
    return Counter(kind.window for kind in model.kinds)


def keys_seen(length: int, window: int | None) -> int:
    """Count (query, key) pairs for a document's first `length` queries, own keys included."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def block_length(seq_length: int, size: int, num_documents: int) -> int:
    """Compute the tokens per block in a row that `size` ranks share. `seq_length` is a multiple of 2 `size`.

    A rank has BLOCKS_OF_ONE blocks if the row is one document, else up to BLOCKS_OF_SEVERAL.
    """
    part = seq_length // size
    return part // (BLOCKS_OF_ONE if num_documents == 1 else math.gcd(BLOCKS_OF_SEVERAL, part))


def block_work(documents: Sequence[int], length: int, windows: Windows) -> list[int]:
    """Count each block's (query, key) pairs, over all layers.

    Args:
        documents: document lengths in the row.
        length: tokens per block.
        windows: number of layers for each attention window.
    """
    starts = [0, *accumulate(documents)]
    work = [0] * (starts[-1] // length)
    for start, stop in pairwise(starts):
        for block in range(start // length, -(-stop // length)):
            first, last = max(start, block * length) - start, min(stop, (block + 1) * length) - start
            work[block] += sum(
                count * (keys_seen(last, window) - keys_seen(first, window)) for window, count in windows.items()
            )
    return work


def deal(work: Sequence[int], size: int) -> list[list[int]]:
    """Deal equally many blocks to each of `size` ranks, balanced by `work`.

    Returns:
        Each rank's block indices, ascending.
    """
    each, rest = divmod(len(work), size)
    assert not rest, f"{len(work)} blocks cannot be dealt evenly to {size} ranks"
    hands: list[list[int]] = [[] for _ in range(size)]
    totals = [0] * size
    for block in sorted(range(len(work)), key=lambda block: (-work[block], -block)):
        rank = min((rank for rank in range(size) if len(hands[rank]) < each), key=lambda rank: (totals[rank], rank))
        hands[rank].append(block)
        totals[rank] += work[block]
    return [sorted(hand) for hand in hands]


def runs_of_ranks(documents: Sequence[int], size: int, windows: Windows) -> list[tuple[tuple[int, int], ...]]:
    """Compute each rank's token runs [start, stop) in a row. Adjacent blocks form one run."""
    length = block_length(sum(documents), size, len(documents))
    return [_joined(hand, length) for hand in deal(block_work(documents, length, windows), size)]


def even_runs(seq_length: int, size: int) -> list[tuple[tuple[int, int], ...]]:
    """Give each rank one run with seq_length / `size` tokens, in rank order."""
    length = seq_length // size
    return [((rank * length, (rank + 1) * length),) for rank in range(size)]


def rank_work(documents: Sequence[int], size: int, windows: Windows) -> list[int]:
    """Count each rank's (query, key) pairs over all layers. `documents` lists one row's document lengths."""
    length = block_length(sum(documents), size, len(documents))
    work = block_work(documents, length, windows)
    return [sum(work[block] for block in hand) for hand in deal(work, size)]


def _joined(blocks: Sequence[int], length: int) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for block in blocks:
        start = block * length
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + length)
        else:
            runs.append((start, start + length))
    return tuple(runs)
