"""Moments of a pipeline rank at which it holds the most microbatches, from its actions alone.

    1F1B, rank 0 of 2      0F0 0F1 0B0 0F2 0B1 0B2       two moments for any m: F beside 1, B beside 1

What a microbatch holds depends on the layout; these moments do not, so layouts with one schedule share them.
"""

from collections.abc import Sequence
from operator import ge
from typing import NamedTuple

from triaxis.engine.pipeline.actions import Action, Kind


class PeakMoment(NamedTuple):
    """A moment of a rank at which it may hold the most: the action, and how many microbatches are held beside it.

    Attributes:
        stage: number of the contents of the action's stage.
        kept: microbatches between their passes, by that number.
        deferred: microbatches whose weight gradients wait, by that number.
    """

    kind: Kind
    stage: int
    kept: tuple[int, ...]
    deferred: tuple[int, ...]


def peaks_of(row: Sequence[Action], chunks: Sequence[int]) -> tuple[PeakMoment, ...]:
    """Return the moments of a rank's actions beside which no other of the same kind and stage holds as much of everything.

    Args:
        row: actions of the rank.
        chunks: number of each chunk's contents.
    """
    kept, deferred = [0] * (max(chunks) + 1), [0] * (max(chunks) + 1)
    seen: dict[tuple[Kind, int], dict[PeakMoment, None]] = {}
    for kind, chunk, _ in row:
        stage = chunks[chunk]
        if kind is Kind.W:
            deferred[stage] -= 1
            continue
        kept[stage] -= kind is not Kind.F
        peak = PeakMoment(kind, stage, tuple(kept), tuple(deferred))
        seen.setdefault((kind, stage), {})[peak] = None
        kept[stage] += kind is Kind.F
        deferred[stage] += kind is Kind.I
    largest: list[PeakMoment] = []
    for peaks in seen.values():
        found: list[tuple[int, ...]] = []
        for peak in sorted(peaks, key=lambda peak: -sum(peak.kept) - sum(peak.deferred)):
            held = peak.kept + peak.deferred
            if not any(all(map(ge, more, held)) for more in found):
                found.append(held)
                largest.append(peak)
    return tuple(largest)
