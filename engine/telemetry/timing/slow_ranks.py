"""Detects ranks that compute longer than ranks with the same work.

    stage 0   rank 0  41 ms    rank 1  40 ms    rank 4  58 ms    rank 5  41 ms        rank 4: 41 % over the median of the others
    stage 1   rank 2  35 ms    rank 3  35 ms    rank 6  36 ms    rank 7  35 ms

Ranks in one pipeline stage have equal work, so they should compute equally long. Waiting does not count as computing, so a slow
rank raises only its own number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SLOWER_BY = 0.3
"""A rank is slow if its compute time exceeds the others' median by more than this fraction of the median."""

IN_A_ROW = 3
"""Number of reports in a row in which a rank must be slow. A single one may be due to a neighbour's job or a garbage collection."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that was slow in `IN_A_ROW` successive reports.

    Attributes:
        rank, host: the slow rank and its host.
        seconds: compute time in the rank's median step, in the last report.
        usual_seconds: median over the other ranks in its stage.
    """

    rank: int
    host: str
    seconds: float
    usual_seconds: float

    def __str__(self) -> str:
        more = self.seconds / self.usual_seconds - 1
        return (
            f"rank {self.rank} on {self.host} is slow: it computes {self.seconds * 1e3:,.0f} ms a step, the other ranks of its "
            f"stage {self.usual_seconds * 1e3:,.0f} ms ({more:.0%} more, in {IN_A_ROW} reports in a row)"
        )


class SlowRanks:
    """Reports a rank once when it becomes slower than its pipeline stage's other ranks.

    Args:
        stage_ranks: each rank's pipeline index, in rank order.
        hosts: each rank's host name, in rank order.
    """

    def __init__(self, stage_ranks: Sequence[int], hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._stages: dict[int, list[int]] = {}
        for rank, stage in enumerate(stage_ranks):
            self._stages.setdefault(stage, []).append(rank)
        self._in_a_row = [0] * len(stage_ranks)

    def report(self, compute_seconds: Sequence[float]) -> list[SlowRank]:
        """List the ranks that become slow with this report.

        `compute_seconds` holds each rank's compute time in its median step.
        """
        named = []
        for ranks in self._stages.values():
            ordered = sorted(ranks, key=lambda rank: compute_seconds[rank])
            in_order = [compute_seconds[rank] for rank in ordered]
            for place, rank in enumerate(ordered):
                usual = _median_without(in_order, place)
                if usual is None or compute_seconds[rank] <= (1 + SLOWER_BY) * usual:
                    self._in_a_row[rank] = 0
                    continue
                self._in_a_row[rank] += 1
                if self._in_a_row[rank] == IN_A_ROW:
                    named.append(SlowRank(rank, self._hosts[rank], compute_seconds[rank], usual))
        return sorted(named, key=lambda slow: slow.rank)


def _median_without(in_order: Sequence[float], place: int) -> float | None:
    """Compute the median of ascending values without the one at `place`. None if no other value is left."""
    count = len(in_order) - 1
    if not count:
        return None

    def other(index: int) -> float:
        return in_order[index if index < place else index + 1]

    return other(count // 2) if count % 2 else (other(count // 2 - 1) + other(count // 2)) / 2
