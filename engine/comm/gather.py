"""Gathers one row of numbers from each rank on rank 0, through existing groups.

    along tp    every rank receives the rows of its tensor-parallel group
    along pp    ranks with tp index 0 receive all pp x tp rows of their pipeline
    along dp    ranks with tp and pp index 0 receive all rows; rank 0 is one of them

Only the ranks in the dp line have traffic that grows with the number of replicas.
"""

from itertools import pairwise

import torch

from triaxis.engine.comm.topology import Topology

ORDER = ("tp", "pp", "dp", "dp_shard", "dp_replicas")
"""Axes in the order in which rows travel along them; the last two stand in place of `dp` if the state has replicas."""


class Gathering:
    """One gather in progress to rank 0.

    Rows are 1-D and equally long on every rank. All ranks create and finish the same gatherings in the same order.
    """

    def __init__(self, topology: Topology, row: torch.Tensor, purpose: str) -> None:
        self._topology = topology
        self._purpose = purpose
        axes = [axis for name in ORDER if (axis := topology.optional_axis(name))]
        # The first call stays in flight until `finish`; a one-rank axis makes no call.
        self._axes = [axis for axis in axes if axis.size > 1] or axes[:1]
        self._pending = self._axes[0].all_gather(row, purpose)

    def finish(self) -> torch.Tensor | None:
        """Return all ranks' rows [world size, n] in rank order on rank 0, None elsewhere."""
        rows = self._pending.wait()
        for before, axis in pairwise(self._axes):
            if before.index:
                return None
            rows = axis.all_gather(rows, self._purpose).wait()
        if self._topology.rank:
            return None
        sizes = self._topology.sizes
        by_place = rows.view(sizes.dp_cp, sizes.pp, sizes.tp, -1).transpose(0, 1)
        return by_place.reshape(sizes.world_size, -1)
