"""Describes tensor pieces as boxes, so that another layout can load them.

A rank owns a flat range in the row-major local box of a parameter (`layout/param_layout.Segment`). In n dims, such a range consists
of at most 2n - 1 boxes, each contiguous in the range:

    local box [0:4, 8:12] of a tensor [4, 16], flat range [2, 13)        . . x x    head   [0:1, 10:12]   range 2..4
                                                                         x x x x    middle [1:3,  8:12]   range 4..12
                                                                         x x x x
                                                                         x . . .    tail   [3:4,  8:9 ]   range 12..13

To load a piece into another layout, the loader intersects boxes. Each intersection is one strided copy.
"""

import math
from collections.abc import Iterator

from triaxis.engine.layout.shard_spec import Box


def flat_boxes(box: Box, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes that make up the flat range [start, stop) of the row-major `box`.

    Each item is (smaller box, first), in the order of the range. The smaller box is contiguous in `box`. `first` is the row-major
    index in `box` of its first element.
    """
    assert 0 <= start <= stop <= math.prod(box_shape(box)), f"the range [{start}, {stop}) leaves the box {box}"
    if start == stop:
        return
    if not box:
        yield (), 0
        return
    (first, _), rest = box[0], box[1:]
    inner = math.prod(high - low for low, high in rest)
    row, skipped = divmod(start, inner)
    end_row, over = divmod(stop, inner)
    if row == end_row:
        for part, at in flat_boxes(rest, skipped, stop - row * inner):
            yield ((first + row, first + row + 1), *part), row * inner + at
        return
    if skipped:
        for part, at in flat_boxes(rest, skipped, inner):
            yield ((first + row, first + row + 1), *part), row * inner + at
        row += 1
    if row < end_row:
        yield ((first + row, first + end_row), *rest), row * inner
    if over:
        for part, at in flat_boxes(rest, 0, over):
            yield ((first + end_row, first + end_row + 1), *part), end_row * inner + at


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def intersect(one: Box, other: Box) -> Box | None:
    """Return the common part of two boxes, or None if they are disjoint."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select `inner` from an array that holds `outer`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))
