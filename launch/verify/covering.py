"""A few configurations in which every pair of features meets.

Composition bugs need two features together far more often than three. A greedy covering array keeps all legal pairs. Its number
of rows grows with the square of the largest number of choices, not with the product of all numbers.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, Hashable]
"""One choice for each feature."""

Pair = frozenset[tuple[str, Hashable]]


def covering_rows(features: Mapping[str, Sequence[Hashable]], is_legal: Callable[[Row], bool]) -> list[Row]:
    """Choose rows that cover every pair of choices found in any legal row.

    Args:
        features: feature names and their choices; ties go to earlier choices.
        is_legal: whether a row can be run.

    Returns:
        At most as many rows as there are pairs. The result depends on the arguments alone.
    """
    names = list(features)
    legal = [row for values in product(*features.values()) if is_legal(row := dict(zip(names, values, strict=True)))]
    bits: dict[Pair, int] = {}
    # Each row's pairs are the bits of one integer, because bits are counted quickly.
    masks = [sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs(row)) for row in legal]
    missing = (1 << len(bits)) - 1
    rows = []
    while missing:
        # `max` takes the first among equals, so the order of choices decides.
        best = max(range(len(legal)), key=lambda number: (masks[number] & missing).bit_count())
        rows.append(legal[best])
        missing &= ~masks[best]
    return rows


def pairs(row: Row) -> Iterator[Pair]:
    """Yield every pair of choices in a row."""
    for one, other in combinations(row.items(), 2):
        yield frozenset((one, other))
