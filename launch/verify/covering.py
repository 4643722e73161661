"""A few configurations in which every pair of features meets.

Bugs of composition need two features together far more often than three. A greedy covering array keeps all pairs that are
legal together in a number of rows that grows with the square of the most choices, not with their product.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, Hashable]
"""A choice for each feature."""

Pair = frozenset[tuple[str, Hashable]]


def covering_rows(features: Mapping[str, Sequence[Hashable]], is_legal: Callable[[Row], bool]) -> list[Row]:
    """Choose rows such that every pair of choices that is in any legal row is in one of these.

    Args:
        features: names and their choices; earlier choices are preferred where any will do.
        is_legal: whether a row can be run.

    Returns:
        At most as many rows as there are pairs; the same for the same arguments.
    """
    names = list(features)
    legal = [row for values in product(*features.values()) if is_legal(row := dict(zip(names, values, strict=True)))]
    bits: dict[Pair, int] = {}
    # The pairs of each row as bits of a number, which are counted quickly.
    masks = [sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs(row)) for row in legal]
    missing = (1 << len(bits)) - 1
    rows = []
    while missing:
        # `max` takes the first of the best, so the order of the choices decides.
        best = max(range(len(legal)), key=lambda number: (masks[number] & missing).bit_count())
        rows.append(legal[best])
        missing &= ~masks[best]
    return rows


def pairs(row: Row) -> Iterator[Pair]:
    """Return every two choices of a row."""
    for one, other in combinations(row.items(), 2):
        yield frozenset((one, other))
