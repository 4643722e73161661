"""The compiled half of Transformer Engine: its names of dtypes."""

import enum


class DType(enum.IntEnum):
    """The FP8 formats, by TE's names."""

    kFloat8E4M3 = 7  # noqa: N815
    kFloat8E5M2 = 8  # noqa: N815
