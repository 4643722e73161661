"""What no training rank imports stays out of engine/.

The bound only falls. The commit that raises it argues why.
"""

from benchmarks.code_lines import unimported

MOST = 111
"""Code lines; 35 of them are for the loss of an extension, which a rank imports with it."""


def test_engine_holds_little_that_no_training_rank_imports() -> None:
    left = unimported()
    assert sum(left.values()) <= MOST, left
