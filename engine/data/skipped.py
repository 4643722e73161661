"""Samples that a run leaves out: ranges of sample ids, part of the run's state (no torch here).

    skipped [8, 12) [20, 24)

    position      0 .. 7    8  9  ..  15    16 17 ..        the run's n-th sample; what `consumed_samples` counts
    sample id     0 .. 7   12 13  ..  19    24 25 ..        what the data set is asked for

The samples that are not left out follow each other without gaps, so a step is a function of (consumed samples, skipped ranges), in
every layout, and a run makes as many steps of as many samples as it would without. Ids that lie ahead of all consumed positions may
be left out at any time: what was trained on before does not change. A sample id is one visit to a sample: another epoch visits it
under another id.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import DataError

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SkippedRanges:
    """Sample ids that are left out.

    Attributes:
        ranges: (first id, id after the last), ascending, neither empty nor touching each other.
    """

    ranges: Ranges = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> "SkippedRanges":
        """Any ranges, in any order; those that meet become one.

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
        """These and others."""
        return SkippedRanges.of((*self.ranges, *ranges))

    def id_at(self, position: int) -> int:
        """The id of the run's sample number `position`, from 0."""
        sample_id = position
        for start, stop in self.ranges:
            if sample_id < start:
                break
            sample_id += stop - start
        return sample_id

    def ids(self, position: int, count: int) -> list[int]:
        """The ids of `count` samples from `position` on."""
        return [self.id_at(place) for place in range(position, position + count)]

    def span(self, position: int, count: int) -> tuple[int, int]:
        """The range of ids from that of `position` to that of the last of `count` samples: what to add to leave these out."""
        return self.id_at(position), self.id_at(position + count - 1) + 1

    def keeps_past_of(self, earlier: "SkippedRanges", consumed_samples: int) -> bool:
        """Whether the first `consumed_samples` are the same samples under both."""
        if consumed_samples == 0:
            return True
        # Both are strictly ascending in the position, and this one leaves out no less: equal at the end is equal before.
        is_more = self.with_(earlier.ranges) == self
        return is_more and self.id_at(consumed_samples - 1) == earlier.id_at(consumed_samples - 1)
