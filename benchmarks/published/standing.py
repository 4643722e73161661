"""The place that the planner gives to published layouts, on the same cluster and with the same software.

The layout of a run is (tp, cp, pp, dp); the planner chooses micro batch, chunks and recomputation for each. Published software has
1F1B and interleaved schedules, so others of this engine stand aside.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.published.compare import Row
from benchmarks.published.runs import setup_of
from triaxis.engine.errors import ConfigError
from triaxis.launch.planning.search import search

FIRST = 5
"""Places that count as found."""

CLOSE = 0.03
"""Slower than the planner's first by no more, a layout counts as found as well."""

SEARCHED = 100
"""Layouts of a search, with each micro batch and schedule one of its own."""

SCHEDULES = frozenset({"auto", "1f1b", "interleaved"})


@dataclass(frozen=True, slots=True)
class Standing:
    """The place of a published layout.

    Attributes:
        place: among the layouts of the planner, the fastest is 1; None: it is not among them.
        slower: than the planner's first, as a share of its time; None: unknown.
        first: the planner's first in words.
    """

    row: Row
    place: int | None
    slower: float | None
    first: str

    @property
    def is_found(self) -> bool:
        return (self.place is not None and self.place <= FIRST) or (self.slower is not None and self.slower <= CLOSE)


def standings(rows: Sequence[Row], most_gpus: int) -> Iterator[Standing]:
    """Search the clusters of scored rows with at most so many GPUs; rows for which no layout is legal or fits are left out."""
    for row in rows:
        if row.is_scored and row.run.numbers["gpus"] <= most_gpus:
            yield from _standing(row)


def _standing(row: Row) -> Iterator[Standing]:
    setup = setup_of(row.run)
    config, sizes = setup.choices[0]
    try:
        plan = search(config, setup.cluster, simulated=SEARCHED, implementation=setup.implementation)
    except ConfigError:
        return
    fastest: dict[tuple[int, int, int, int], float] = {}
    found = [one for one in plan.found if one.config.schedule.name in SCHEDULES]
    for one in found:
        fastest.setdefault((one.sizes.tp, one.sizes.cp, one.sizes.pp, one.sizes.dp), one.time.seconds)
    if not found:
        return
    published = sizes.tp, sizes.cp, sizes.pp, sizes.dp
    place = list(fastest).index(published) + 1 if published in fastest else None
    slower = None if place is None else fastest[published] / found[0].time.seconds - 1
    yield Standing(row, place, slower, found[0].layout)


def lines(found: Sequence[Standing]) -> Iterator[str]:
    """Yield the places, a line each, and how many are found."""
    for one in found:
        place = f"not among the {SEARCHED} fastest" if one.place is None else f"place {one.place}"
        slower = "" if one.slower is None else f", {one.slower:.1%} slower than the first".replace("%", " %")
        yield f"line {one.row.run.line} {one.row.run.name} on {one.row.run.words['gpus']}: {place}{slower}; first: {one.first}"
    count = sum(one.is_found for one in found)
    yield f"published layouts among the first {FIRST} or within {CLOSE:.0%}: {count} of {len(found)}".replace("%", " %")
