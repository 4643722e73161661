"""Moments at which a pipeline rank holds the most microbatches, found from its actions alone.

    1F1B, rank 0 of 2      0F0 0F1 0B0 0F2 0B1 0B2       two moments for any m: F beside 1, B beside 1

A microbatch's bytes depend on the layout, but these moments do not: layouts with the same schedule share them.
"""

from collections.abc import Sequence
from operator import ge
from typing import NamedTuple

from triaxis.engine.pipeline.actions import Action, Kind


class PeakMoment(NamedTuple):
    """A moment at which a rank may hold the most: the action, and the number of microbatches held beside it.

    Attributes:
        stage: contents number of the action's stage.
        kept: number of microbatches between forward and backward, by contents number.
        deferred: number of microbatches whose weight gradients are pending, by contents number.
    """

    kind: Kind
    stage: int
    kept: tuple[int, ...]
    deferred: tuple[int, ...]


def peaks_of(row: Sequence[Action], chunks: Sequence[int]) -> tuple[PeakMoment, ...]:
    """Find a rank's peak moments.

    A moment counts if no other with the same action kind and stage holds at least as much of everything.

    Args:
        row: the rank's actions.
        chunks: contents number of each chunk.
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
