"""Time collectives and sends over a cluster's links, by the nodes that their ranks are on.

A call takes a rank's bytes on the wire (`models/predict/traffic.py`) / bandwidth + latency:

in a node   bandwidth: the share of NVLink's that collectives reach; latency: the device's, for a small collective
over nodes  a ring leaves each node once per network adapter, and a group's r ranks on a node use r adapters, so
            bandwidth = min(NVLink's share, r x an adapter's / oversubscription);
            latency: the device's, and the network's for each further node
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.layout.shard_spec import ReduceAxis
from triaxis.models.predict.device import Device
from triaxis.models.predict.step_time.cluster import Cluster

NETWORK_SHARE = 0.94
"""Share of an adapter's rate that is reached: 46 to 48 of 50 GB/s with NDR (NVIDIA/nccl-tests issue 290)."""


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes that a rank puts on the wire in some calls."""

    bytes: float = 0.0
    calls: int = 0

    def times(self, count: float) -> "Wire":
        return Wire(self.bytes * count, round(self.calls * count))

    def __add__(self, other: "Wire") -> "Wire":
        return Wire(self.bytes + other.bytes, self.calls + other.calls)


@dataclass(frozen=True, slots=True)
class Link:
    """The link between one group's ranks.

    Attributes:
        bytes_per_s: bytes per second that a rank sends in large calls.
        call_seconds: seconds that a call with few bytes takes.
    """

    bytes_per_s: float
    call_seconds: float

    def seconds(self, wire_bytes: float, calls: float = 1) -> float:
        """Seconds for `calls` calls in which each rank puts `wire_bytes` bytes in all on the wire."""
        return wire_bytes / self.bytes_per_s + calls * self.call_seconds


class Links:
    """One layout's links on a cluster.

    Args:
        cluster: the cluster, whose nodes are filled in rank order.
        device: the cluster's device.
        grid: the layout's rank grid.
        memo: cache of other layouts' links on this cluster; read and filled.
    """

    def __init__(self, cluster: Cluster, device: Device, grid: RankGrid, memo: dict[object, Any] | None = None) -> None:
        self._cluster, self._grid = cluster, grid
        self._memo = {} if memo is None else memo
        self._nvlink = cluster.nvlink_gb_per_s * 1e9 * device.collective_share
        self._network = cluster.network_gb_per_s * 1e9 * NETWORK_SHARE / cluster.oversubscription
        self._call = device.collective_us * 1e-6

    def of_axes(self, *axes: str) -> Link:
        """Find the link between the ranks of rank 0's group over these axes."""
        sizes = self._grid.sizes
        key = ("link", axes, sizes.shape)
        if key not in self._memo:
            ranks = [0]
            for axis in axes:
                step = self._grid.rank(**{axis: 1}) if sizes.size(axis) > 1 else 0
                ranks = [rank + place * step for rank in ranks for place in range(sizes.size(axis))]
            self._memo[key] = self.of_group(ranks)
        link: Link = self._memo[key]
        return link

    def of_group(self, ranks: Sequence[int]) -> Link:
        """Find the link between these ranks."""
        on_node = Counter(map(self._grid.node, ranks))
        if len(on_node) == 1:
            return Link(self._nvlink, self._call)
        latency = self._call + (len(on_node) - 1) * self._cluster.network_latency_us * 1e-6
        return Link(min(self._nvlink, min(on_node.values()) * self._network), latency)

    def of_experts(self) -> Link:
        """Find the link between the ranks that share a set of experts."""
        return self.of_group(range(self._grid.sizes.expert_ranks))

    def of_owners(self, axis: ReduceAxis) -> Link:
        """Find the link between the ranks that own a part of the same copy of the state each."""
        sizes = self._grid.sizes
        block = sizes.world_size // sizes.pp // sizes.dp_replicas
        return self.of_group(range(0, block, sizes.tp if axis == "dp" else sizes.expert_ranks))

    def of_state_replicas(self) -> Link:
        """Find the link between the ranks that own the same part of different copies of the state."""
        sizes = self._grid.sizes
        stage = sizes.world_size // sizes.pp
        return self.of_group(range(0, stage, stage // sizes.dp_replicas))

    def hand_over(self) -> Link:
        """Find the link that a message between neighbouring pipeline ranks uses; its latency is half of a collective's."""
        if self._grid.sizes.pp == 1 or self._grid.node(self._grid.rank(pp=1)) == self._grid.node(0):
            return Link(self._nvlink, self._call / 2)
        return Link(self._network, self._cluster.network_latency_us * 1e-6 + self._call / 2)
