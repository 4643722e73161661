"""Device memory that NCCL holds for a rank's communicators, counted from the layout alone.

This is an estimate, not measured on this engine. For each communicator, channel and connected neighbour, NCCL allocates memory
outside torch's allocator (`ncclP2pAllocateShareableBuffer` in NCCL's src/transport/p2p.cc):

    receiver   buffers of the protocols LL 0.5 MiB + LL128 4.7 MiB + Simple 4 MiB (NCCL_BUFFSIZE), in pages of 2 MiB:  10 MiB
    sender     one page for its flags:                                                                               2 MiB

Eight H100 GPUs, connected all to all over 32 channels, allocated buffers in these two sizes (NVIDIA/nccl issue 1685). A channel in
a ring has one neighbour to receive from and one to send to. The pipeline's two communicators also exchange messages with both ring
neighbours, over other connections. On a node with eight H100 NCCL chooses 24 channels for collectives and 32 for messages (its log
at NCCL_DEBUG=INFO); `max_ctas` in `triaxis.engine.layout.axis_groups.STREAM_USE` limits both.

Not counted: network buffers, and the connections for trees and NVLink SHARP, which NCCL opens at startup
(NCCL_RUNTIME_CONNECT=0, `engine/comm/runtime.py`).
"""

from collections.abc import Sequence
from dataclasses import replace

from triaxis.engine.layout.axis_groups import CONNECTED_LATER, axis_groups, stream_use
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid

MIB = 2**20
RECEIVE_BYTES = 10 * MIB
SEND_BYTES = 2 * MIB
RING_CHANNELS = 24
MESSAGE_CHANNELS = 32

MESSAGE_AXES = ("pp_forward", "pp_backward")
"""Axes whose communicators send and receive messages."""


def communicator_bytes(sizes: ParallelSizes, kv_heads: int | None, *, has_experts: bool = False) -> tuple[int, ...]:
    """Estimate the bytes that NCCL holds for a rank's communicators; the tuple has one number for each pipeline index.

    Args:
        kv_heads: number of the model's key/value heads; None: as many as query heads.
        has_experts: the model has experts, and so process groups for the experts' tokens and gradients.
    """
    # Groups and neighbours depend on dp, its replicas and cp only up to 2, and on pp only up to 3. So a small grid represents a
    # large one, whose groups would take long to list. Ranks that share experts may span all cp ranks.
    cp = min(sizes.cp, 2) if sizes.expert_ranks == 1 else sizes.cp
    replicas = min(sizes.dp_replicas, 2)
    dp = replicas * _fewest_dp(replace(sizes, dp=sizes.dp // sizes.dp_replicas, dp_replicas=1))
    small = replace(sizes, pp=min(sizes.pp, 3), dp=dp, dp_replicas=replicas, cp=cp)
    grid = RankGrid(small, allow_tp_across_nodes=True)
    by_stage = []
    for pp in range(small.pp):
        groups = communicators(grid, grid.rank(pp=pp), kv_heads, has_experts=has_experts)
        connections = sum(connections_of(axes, len(ranks)) for ranks, axes in groups)
        by_stage.append(connections * (RECEIVE_BYTES + SEND_BYTES))
    return tuple(by_stage[-1 if pp == sizes.pp - 1 else min(pp, 1)] for pp in range(sizes.pp))


def _fewest_dp(sizes: ParallelSizes) -> int:
    """Find the smallest dp with as many kinds of process groups as the layout's own dp.

    It is at least 2 if the layout's dp is, and its ranks hold two whole sets of experts, or one if the layout has only one.
    """
    for dp in range(min(sizes.dp, 2), sizes.dp):
        num_sets, rest = divmod(sizes.tp * sizes.cp * dp, sizes.expert_ranks)
        if rest == 0 and num_sets >= min(2, sizes.expert_dp):
            return dp
    return sizes.dp


def communicators(
    grid: RankGrid, rank: int, kv_heads: int | None, *, has_experts: bool = False
) -> list[tuple[tuple[int, ...], list[str]]]:
    """List a rank's process groups with more than one member: (members, axes that share the group)."""
    found: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for name, groups, channel in axis_groups(grid, kv_heads, has_experts=has_experts):
        ranks = next((ranks for ranks in groups if rank in ranks), ())
        if len(ranks) > 1:
            found.setdefault((ranks, channel), []).append(name)
    return [(ranks, axes) for (ranks, _), axes in found.items()]


def connections_of(axes: Sequence[str], size: int) -> int:
    """Count a rank's connections in one communicator, one for each channel and neighbour.

    Args:
        axes: axes that share the communicator.
        size: number of its ranks.
    """
    connected = [axis for axis in axes if axis not in CONNECTED_LATER]
    if not connected:
        return 0
    limit = stream_use(axes).max_ctas
    connections = _limited(RING_CHANNELS, limit)
    if any(axis in MESSAGE_AXES for axis in connected):
        connections += min(2, size - 1) * _limited(MESSAGE_CHANNELS, limit)
    return connections


def _limited(channels: int, limit: int | None) -> int:
    return channels if limit is None else min(channels, limit)
