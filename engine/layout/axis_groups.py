"""List a layout's process groups by axis, and choose how NCCL uses a GPU for each."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from triaxis.engine.layout.rank_grid import RankGrid

OF_EXPERTS = ("sample", "experts", "expert_dp")
"""The axes that only models with experts have."""

OF_REPLICAS = ("dp_shard", "dp_replicas", "expert_dp_shard")
"""The axes that stand in place of `dp` and `expert_dp` if there are replicas of the state (`parallel.dp_replicas`)."""

AXIS_NAMES = (
    *("world", "tp", "cp", "dp", "pp", "pp_forward", "pp_backward", "ends", "kv_replicas"),
    *(*OF_EXPERTS, *OF_REPLICAS),
)
"""Names that `axis_groups` may yield; those after `ends` only in some layouts."""

CONNECTED_LATER = ("pp",)
"""Axes connected on first use rather than at the start of a run; training does not use them."""


def axis_groups(
    grid: RankGrid, kv_heads: int | None, *, has_experts: bool = False
) -> Iterator[tuple[str, Sequence[tuple[int, ...]], str]]:
    """Yield (axis name, rank groups, channel) in creation order.

    Axes with equal rank groups share a process group, unless their channels ("", "forward", "backward") differ.
    """
    yield "world", [tuple(range(grid.world_size))], ""
    yield "tp", grid.groups("tp"), ""
    yield "cp", grid.groups("cp"), ""
    yield grid.sizes.owner_axis("dp"), grid.shards("dp"), ""
    if grid.sizes.dp_replicas > 1:
        yield "dp_replicas", grid.state_replicas(), ""
    yield "pp", grid.groups("pp"), ""
    yield "pp_forward", grid.groups("pp"), "forward"
    yield "pp_backward", grid.groups("pp"), "backward"
    yield "ends", grid.end_stage_groups(), ""
    if kv_heads is not None and kv_heads < grid.sizes.tp:
        yield "kv_replicas", grid.tp_blocks(grid.sizes.tp // kv_heads), ""
    if has_experts:
        yield "sample", grid.groups("cp", "tp"), ""
        yield "experts", grid.expert_blocks(), ""
        yield grid.sizes.owner_axis("expert_dp"), grid.shards("expert_dp"), ""


class StreamUse(NamedTuple):
    """How NCCL uses a GPU for one group.

    Attributes:
        is_urgent: whether its kernels start before compute kernels that were posted earlier.
        max_ctas: largest number of thread blocks per call, one per SM; None: NCCL's choice.
    """

    is_urgent: bool
    max_ctas: int | None


STREAM_USE: Mapping[str, StreamUse] = {
    # The computation waits for these, and posts them during GEMMs that would hold them up.
    "tp": StreamUse(is_urgent=True, max_ctas=None),
    # Attention waits for keys and values, and has nothing else to do meanwhile.
    "cp": StreamUse(is_urgent=True, max_ctas=None),
    # An early receive occupies its SMs until the peer sends.
    "pp_forward": StreamUse(is_urgent=True, max_ctas=4),
    "pp_backward": StreamUse(is_urgent=True, max_ctas=4),
    # A layer waits for its experts' tokens, and for their outputs.
    "experts": StreamUse(is_urgent=True, max_ctas=None),
    "sample": StreamUse(is_urgent=True, max_ctas=None),
    # Buckets may arrive any time until the backward ends.
    "dp": StreamUse(is_urgent=False, max_ctas=16),
    "expert_dp": StreamUse(is_urgent=False, max_ctas=16),
    **dict.fromkeys(OF_REPLICAS, StreamUse(is_urgent=False, max_ctas=16)),
}
"""GPU use by axis; if axes share a group, the first one here wins. NCCL decides for all others. (Not measured on a GPU yet.)"""


def stream_use(axes: Sequence[str]) -> StreamUse:
    """Choose NCCL's stream priority and thread-block limit for a process group that these axes share."""
    return next((use for name, use in STREAM_USE.items() if name in axes), StreamUse(is_urgent=False, max_ctas=None))
