"""The deal of a row's tokens to the context-parallel ranks, balanced by attention work.

A causal query sees all keys before it, so the later half of a row has most of the attention. A row of s tokens is cut into equal
blocks, and each of c ranks gets the same number of them: s/c tokens, whatever the documents are. The heaviest block is dealt first,
to the rank with the least work that still has room (longest processing time first, Graham 1969, with a bound on blocks per rank).

With one document and 2 c blocks, rank r gets blocks r and 2 c - 1 - r, which is exactly balanced (2407.21783, section 3.3.2). With
several documents, whose attention ends at their boundaries, blocks have arbitrary work, so there are more and smaller blocks.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from triaxis.engine.config.model import ModelConfig

BLOCKS_OF_ONE = 2
"""Blocks per rank of a row with one document."""

BLOCKS_OF_SEVERAL = 8
"""Blocks per rank of a row with several documents; fewer, but an even number, if s/c is no multiple of 8."""

Windows = Mapping[int | None, int]
"""Attention window in keys, None for full attention (`LayerKind.window`) -> number of layers with it."""


def windows_of(model: ModelConfig) -> Windows:
    """Count the layers of a model by their windows."""
    return Counter(kind.window for kind in model.kinds)


def keys_seen(length: int, window: int | None) -> int:
    """Count the (query, key) pairs of a document's first `length` queries, each with its own key among them."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def block_length(seq_length: int, size: int, num_documents: int) -> int:
    """Return the tokens per block of a row that `size` ranks share; `seq_length` is a multiple of 2 `size`."""
    part = seq_length // size
    return part // (BLOCKS_OF_ONE if num_documents == 1 else math.gcd(BLOCKS_OF_SEVERAL, part))


def block_work(documents: Sequence[int], length: int, windows: Windows) -> list[int]:
    """Count the (query, key) pairs of each block of `length` tokens, over all layers.

    Args:
        documents: lengths of a row's documents.
        length: tokens per block.
        windows: windows of the layers.
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
    """Deal blocks to `size` ranks, the same number to each; return the ascending block numbers of each rank."""
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
    """Return the runs [start, stop) of each of `size` ranks in a row of these documents; adjacent blocks make one run."""
    length = block_length(sum(documents), size, len(documents))
    return [_joined(hand, length) for hand in deal(block_work(documents, length, windows), size)]


def even_runs(seq_length: int, size: int) -> list[tuple[tuple[int, int], ...]]:
    """Return one run of seq_length / `size` tokens for each of `size` ranks, in rank order."""
    length = seq_length // size
    return [((rank * length, (rank + 1) * length),) for rank in range(size)]


def rank_work(documents: Sequence[int], size: int, windows: Windows) -> list[int]:
    """Count the (query, key) pairs of each rank in a row of these documents, over all layers."""
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
