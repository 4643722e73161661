"""How many queries a block of attention in plain operators has."""

BLOCK = 256
"""Queries of a block where nothing asks for another size."""

MOST_SCORES = 2**25
"""Scores of a block that is larger than BLOCK, over all rows and heads."""

LEAST_BLOCKS = 8
"""Such blocks of a row. With n blocks, the products of a causal row have 1 / n more FLOPs than its visible keys need."""


def block_size(num_rows: int, num_queries: int, num_keys: int, least: int = BLOCK) -> int:
    """Return the queries of a block; `num_rows`: samples times heads."""
    return max(least, min(MOST_SCORES // (num_rows * num_keys), num_queries // LEAST_BLOCKS))
