"""Samples that a run skips: ranges of sample ids, part of the run's state.

    skipped [8, 12) [20, 24)

    position      0 .. 7    8  9  ..  15    16 17 ..        the run's n-th sample; what `consumed_samples` counts
    sample id     0 .. 7   12 13  ..  19    24 25 ..        the id in the data set

The remaining samples follow each other without gaps. So a step is a function of (consumed samples, skipped ranges) in every layout,
and a run makes as many steps as without skipped ranges. Ids ahead of all consumed positions may be skipped at any time: earlier
steps do not change. A sample id is one visit to a sample; another epoch visits it under another id.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from triaxis.engine.errors import DataError

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SkippedRanges:
    """Skipped sample ids.

    Attributes:
        ranges: (first id, id after the last), ascending, not empty and not touching each other.
    """

    ranges: Ranges = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> "SkippedRanges":
        """Build from ranges in any order; those that meet are merged.

        Raises:
            DataError: a range is empty or begins below zero.
        """
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if not 0 <= start < stop:
                raise DataError(
                    f"the skipped range [{start}, {stop}) is none: ids begin at 0, and the second number is the id after the last "
                    f"one that is left out."
                )
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return cls(tuple(merged))

    def with_(self, ranges: Iterable[tuple[int, int]]) -> "SkippedRanges":
        """Return the union with other ranges."""
        return SkippedRanges.of((*self.ranges, *ranges))

    def id_at(self, position: int) -> int:
        """Return the id of the run's sample number `position`, from 0."""
        sample_id = position
        for start, stop in self.ranges:
            if sample_id < start:
                break
            sample_id += stop - start
        return sample_id

    def ids(self, position: int, count: int) -> list[int]:
        """Return the ids of `count` samples from `position` on."""
        return [self.id_at(place) for place in range(position, position + count)]

    def span(self, position: int, count: int) -> tuple[int, int]:
        """Return the range of ids from that of `position` to the last of `count` samples: the range to add to skip these."""
        return self.id_at(position), self.id_at(position + count - 1) + 1

    def keeps_past_of(self, earlier: "SkippedRanges", consumed_samples: int) -> bool:
        """Return whether the first `consumed_samples` are the same samples under both."""
        if consumed_samples == 0:
            return True
        # Both ascend strictly, and this one skips no less: equal at the end means equal before.
        is_more = self.with_(earlier.ranges) == self
        return is_more and self.id_at(consumed_samples - 1) == earlier.id_at(consumed_samples - 1)
