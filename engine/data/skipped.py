"""Maps a run's positions to sample ids, without those that the run skips.

    skipped [8, 12) [20, 24)

    position      0 .. 7    8  9  ..  15    16 17 ..        the run's n-th sample, as `consumed_samples` counts
    sample id     0 .. 7   12 13  ..  19    24 25 ..        the id in the data set

The remaining samples follow each other without gaps. So a step depends only on (consumed samples, skipped ranges), and skipping
does not change the number of steps. Ids that the run has not reached may be skipped at any time. A sample has a new id in each
epoch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from triaxis.engine.errors import DataError

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SkippedRanges:
    """The ranges of sample ids that a run skips.

    Attributes:
        ranges: (first id, id after the last) pairs, ascending; no range is empty or touches another.
    """

    ranges: Ranges = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> "SkippedRanges":
        """Build from ranges in any order, and merge ranges that touch or overlap.

        Raises:
            DataError: a range is empty or begins below zero.
        """
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if not 0 <= start < stop:
                raise DataError(
                    f"the skipped range [{start}, {stop}) is invalid: the first id must be at least 0, and the second number, "
                    f"the id after the last skipped one, must be larger."
                )
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return cls(tuple(merged))

    def with_(self, ranges: Iterable[tuple[int, int]]) -> "SkippedRanges":
        """Return these ranges merged with more ranges."""
        return SkippedRanges.of((*self.ranges, *ranges))

    def id_at(self, position: int) -> int:
        """Map the run's sample number `position`, from 0, to its id in the data set. Skipped samples have ids only."""
        sample_id = position
        for start, stop in self.ranges:
            if sample_id < start:
                break
            sample_id += stop - start
        return sample_id

    def ids(self, position: int, count: int) -> list[int]:
        """List the ids for `count` samples from `position` on."""
        return [self.id_at(place) for place in range(position, position + count)]

    def span(self, position: int, count: int) -> tuple[int, int]:
        """Return the ids [first, end) of the run's `count` samples from `position` on, to skip them.

        Positions count the run's samples, ids all samples in the data set.
        """
        return self.id_at(position), self.id_at(position + count - 1) + 1

    def keeps_past_of(self, earlier: "SkippedRanges", consumed_samples: int) -> bool:
        """Whether these ranges include `earlier` and give the run's first `consumed_samples` samples the same ids.

        True if nothing is consumed.
        """
        if consumed_samples == 0:
            return True
        # Ids ascend strictly, and this one skips at least as much: if the last ids are equal, so are all earlier ones.
        is_more = self.with_(earlier.ranges) == self
        return is_more and self.id_at(consumed_samples - 1) == earlier.id_at(consumed_samples - 1)
