"""Largest values that a field may have: a slip of a few zeros is refused before anything of that size is built (no torch here).

Every bound is far above what any run has used, and low enough that lists of such a length are made in seconds.
"""

MOST_LAYERS = 10_000
"""Transformer layers."""

MOST_HEADS = 2**16
"""Query heads, and key/value heads."""

LARGEST_WIDTH = 2**24
"""Elements of any hidden dimension: the residual stream, the MLP, one head."""

LONGEST_SEQUENCE = 2**30
"""Tokens of one training sample."""

LARGEST_VOCABULARY = 2**28
"""Tokens of the vocabulary, and the multiple to which it is padded."""

MOST_MICROBATCHES = 2**17
"""Microbatches per pipeline and step: a schedule lists a forward and a backward of each."""

MOST_STEPS = 2**40
"""Optimizer steps of a run; at one step per millisecond they would take 35 years."""

MOST_SAMPLES = 2**50
"""Training samples that a run consumes."""

MOST_TOKENS = 2**60
"""Training tokens that a run consumes."""

SHORTEST_TIMEOUT = 1.0
"""Seconds; the start of a process alone takes longer than less."""

LONGEST_TIMEOUT = 30 * 24 * 3600.0
"""Seconds: 30 days."""

LONGEST_NAME = 128
"""Characters of a run name; file systems allow 255 bytes, and files of a run add to it."""
