"""Choose few configurations in which each legal pair of feature values occurs at least once.

A row is one configuration, with one choice for each feature. The rows are chosen greedily. Together they are a covering array of
pairs. Bugs depend on two features far more often than on three.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, Hashable]
"""One choice for each feature."""

Pair = frozenset[tuple[str, Hashable]]


def covering_rows(features: Mapping[str, Sequence[Hashable]], is_legal: Callable[[Row], bool]) -> list[Row]:
    """Choose rows that cover every pair of choices found in any legal row.

    Args:
        features: choices of each feature. Among rows that cover equally many new pairs, earlier choices win.
        is_legal: whether a row can be run.

    Returns:
        At most as many rows as there are pairs.
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
    """Yield the choices of every two features in a row, which is one configuration."""
    for one, other in combinations(row.items(), 2):
        yield frozenset((one, other))
