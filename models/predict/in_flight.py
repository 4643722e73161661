"""Moments at which a pipeline rank holds the most microbatches, found from its actions alone.

    1F1B, rank 0 of 2: it runs F0 F1 B0 F2 B1 B2. From two microbatches on there are two kinds of such moments:
    a forward F with 1 other microbatch kept, and a backward B with 1 other microbatch kept

The bytes of a microbatch depend on the layout, but these moments depend only on the schedule. So layouts with the same schedule
share the moments.
"""

from collections.abc import Sequence
from operator import ge
from typing import NamedTuple

from triaxis.engine.pipeline.actions import Action, Kind


class PeakMoment(NamedTuple):
    """A moment at which a rank may hold the most: the action that runs, and the other microbatches held at that time.

    Attributes:
        kind: kind of the action.
        stage: index of what the action's stage contains; stages with equal contents share an index.
        kept: number of microbatches between forward and backward, for each such index.
        deferred: number of microbatches whose weight gradients are deferred and pending, for each such index.
    """

    kind: Kind
    stage: int
    kept: tuple[int, ...]
    deferred: tuple[int, ...]


def peaks_of(row: Sequence[Action], chunks: Sequence[int]) -> tuple[PeakMoment, ...]:
    """Find a rank's peak moments.

    A moment is left out if another one with the same action kind and stage has at least as large counts everywhere.

    Args:
        row: the rank's actions.
        chunks: index of the contents (see `PeakMoment`) of each of the rank's model chunks.
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
