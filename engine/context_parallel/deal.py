"""Which tokens of a row each context-parallel rank holds (no torch here).

A causal query sees all keys before it, so the later half of a row is most of its attention. A row of s tokens is cut into equal
blocks, and each of c ranks gets equally many: s/c tokens, whatever the documents are. The heaviest block goes first, to the rank
with the least work so far that still has room (longest processing time first; Graham 1969, with a bound on the number of blocks).

With one document and 2 c blocks rank r gets blocks r and 2 c - 1 - r, which is exactly balanced (2407.21783, section 3.3.2).
Several documents, whose attentions end at their boundaries, make blocks of any weight: there are more and smaller ones then.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from triaxis.engine.config.model import ModelConfig

BLOCKS_OF_ONE = 2
"""Blocks of a rank where a row is one document."""

BLOCKS_OF_SEVERAL = 8
"""Blocks of a rank where it is several; fewer, but an even number, where the tokens do not divide."""

Windows = Mapping[int | None, int]
"""Number of layers by the keys that their queries see (`LayerKind.window`)."""


def windows_of(model: ModelConfig) -> Windows:
    """Count the layers of a model by their windows."""
    return Counter(kind.window for kind in model.kinds)


def keys_seen(length: int, window: int | None) -> int:
    """Return the keys that the first `length` queries of a document see together, their own among them."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def block_length(seq_length: int, size: int, num_documents: int) -> int:
    """Return the tokens of a block of a row with so many documents, which `size` ranks share. 2 `size` divides `seq_length`."""
    part = seq_length // size
    return part // (BLOCKS_OF_ONE if num_documents == 1 else math.gcd(BLOCKS_OF_SEVERAL, part))


def block_work(documents: Sequence[int], length: int, windows: Windows) -> list[int]:
    """Return the keys that the queries of each block of `length` tokens see, over all layers.

    Args:
        documents: lengths of a row's documents.
        windows: of the layers.
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
    """Deal blocks to `size` ranks, equally many to each; return each rank's, in order."""
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
    """Return the runs [start, stop) of each of `size` ranks in a row of these documents; neighbouring blocks are one run."""
    length = block_length(sum(documents), size, len(documents))
    return [_joined(hand, length) for hand in deal(block_work(documents, length, windows), size)]


def even_runs(seq_length: int, size: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the run of each of `size` ranks where they follow each other in the row."""
    length = seq_length // size
    return [((rank * length, (rank + 1) * length),) for rank in range(size)]


def rank_work(documents: Sequence[int], size: int, windows: Windows) -> list[int]:
    """Return the keys that the queries of each rank see, over all layers."""
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
