"""How many tokens' logits the output head computes at a time."""

from math import ceil

from triaxis.engine.config.quantities.plan import part_length
from triaxis.engine.config.tree import Config

HEAD_TOKENS = 2048
"""Least tokens of a piece. A piece's GEMM reads and writes the fp32 gradient of the weight. By an H100's data sheet, that takes
half as long as the products of so many tokens; the prediction counts 6 of these 8 bytes, as if no product ran beside them."""

PIECES = 4
"""Most pieces of a microbatch: a quarter of the logits is little beside what layers keep."""


def may_cut_head(config: Config) -> bool:
    """Whether a head in pieces may compute its gradient in the forward.

    ZeRO 2 and 3 reduce a microbatch's gradients before they take the next one's, so a last stage may not make two forwards in a
    row.
    """
    return config.parallel.zero < 2 or (config.schedule.name != "gpipe" and config.schedule.file is None)


def head_tokens(config: Config) -> int | None:
    """Return the tokens of a piece; None: the logits of all tokens are computed at once, and kept.

    `auto` cuts a microbatch of at least two whole pieces of `HEAD_TOKENS`, into at most `PIECES`.
    """
    asked = config.recompute.head_tokens
    if asked != "auto":
        return asked
    tokens = config.train.micro_batch_size * part_length(config)
    cuts = tokens >= 2 * HEAD_TOKENS and config.model.own.loss is None and may_cut_head(config)
    return max(HEAD_TOKENS, ceil(tokens / PIECES)) if cuts else None
