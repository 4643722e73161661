"""The rank grid: sizes, named axes, coordinates and groups, as plain lists of ranks.

The world is an array of ranks with named axes, slow to fast.

    pp, dp, cp, tp          rank = ((pp_i * DP + dp_i) * CP + cp_i) * TP + tp_i

Tensor-parallel peers are neighbours. They share a node (NVLink); data-parallel peers come next, and pipeline stages are farthest
apart (across nodes). For example, 16 ranks as tp=2, pp=2, dp=4, eight to a node:

    node 0   pp 0:   dp 0: [0 1]    dp 1: [2 3]    dp 2: [4 5]    dp 3: [6 7]
    node 1   pp 1:   dp 0: [8 9]    dp 1: [10 11]  dp 2: [12 13]  dp 3: [14 15]
    tp groups: 0-1, 2-3, ...    dp groups: 0-2-4-6, 1-3-5-7, 8-10-12-14, ...    pp groups: 0-8, 1-9, ...

A group varies its own axes and fixes all other coordinates. Groups come in one global order, so every rank creates its process
groups in the same sequence.

For experts, a stage's dp x cp x tp ranks have a second set of axes, slow to fast (2504.14960, "parallel folding"):

    edp, ep, etp        place in the stage = (edp_i * EP + ep_i) * ETP + etp_i        dp cp tp = edp ep etp

ep x etp neighbours share one set of experts: each rank holds 1/ep of the experts, and 1/etp of each one's width.

With R replicas of the state (HSDP), each stage is cut into R blocks of neighbours. State is cut over a block's data-parallel
ranks (shard groups), and each block has a copy (replica groups: the same place in every block).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from triaxis.engine.errors import TopologyError
from triaxis.engine.layout.rank_rules import (
    partial_node,
    too_many_ranks,
    tp_across_nodes,
    uneven_experts,
    uneven_replicas,
)
from triaxis.engine.layout.shard_spec import ExpertPlace, ReduceAxis

AXES = ("pp", "dp", "cp", "tp")
"""The mesh axes, slow to fast. This order is defined only here."""


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Number of ranks on each axis, and sizes derived from them.

    Attributes:
        dp_replicas: number of copies of the optimizer's state; each copy is cut over (dp / dp_replicas) x cp ranks.
        ep: number of ranks in a stage over which experts are cut; dp x cp x tp = expert_dp x ep x etp.
        etp: number of ranks in a stage over which each expert's width is cut.
        vpp: chunks per pipeline rank.
        is_v: whether a rank's two chunks are placed in a V.

    Raises:
        TopologyError: a size is below 1, the experts' or replicas' sizes do not divide their ranks, or there are too many ranks.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dp_replicas: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    is_v: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "dp_replicas", "cp", "ep", "etp", "vpp"):
            if getattr(self, name) < 1:
                raise TopologyError(
                    f"parallel.{name} = {getattr(self, name)}: sizes start at 1; an axis that is off has size 1."
                )
        if rule := uneven_experts(self.tp * self.cp * self.dp, self.ep, self.etp):
            raise TopologyError(f"{self} {rule}. Choose sizes that divide it.")
        if rule := uneven_replicas(self.dp, self.expert_dp, self.dp_replicas):
            raise TopologyError(f"parallel.dp_replicas = {self.dp_replicas} {rule}. Choose sizes that divide.")
        if rule := too_many_ranks(self.world_size):
            raise TopologyError(f"{self} {rule}. Make the sizes smaller.")

    @property
    def world_size(self) -> int:
        return math.prod(self.size(axis) for axis in AXES)

    @property
    def dp_cp(self) -> int:
        """Number of ranks over which dense gradients are summed."""
        return self.dp * self.cp

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that share one set of experts."""
        return self.ep * self.etp

    @property
    def expert_dp(self) -> int:
        """Number of ranks over which an expert's gradients are summed."""
        return self.dp * self.cp * self.tp // self.expert_ranks

    def reduce_size(self, axis: ReduceAxis) -> int:
        """Look up the size of an axis named by `ParamRecord.reduce_over`."""
        return self.dp_cp if axis == "dp" else self.expert_dp

    def owners(self, axis: ReduceAxis) -> int:
        """Count the ranks on `axis` over which one copy of the state is cut."""
        return self.reduce_size(axis) // self.dp_replicas

    def owner_axis(self, axis: ReduceAxis) -> str:
        """Name the axis over which one copy of the state is cut: `axis`, or with replicas, `axis`_shard."""
        return axis if self.dp_replicas == 1 else f"{axis}_shard"

    def expert_place(self, rank: int) -> ExpertPlace:
        """Compute a rank's ep and etp indices among the ranks that share its experts."""
        ep_index, etp_index = divmod(rank % self.expert_ranks, self.etp)
        return ExpertPlace(self.ep, ep_index, self.etp, etp_index)

    @property
    def num_ends(self) -> int:
        """Number of pipeline ranks that hold the first or the last stage."""
        return 1 if self.pp == 1 or self.is_v else 2

    def size(self, axis: str) -> int:
        return int(getattr(self, axis))

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes in the order of `AXES`."""
        return tuple(self.size(axis) for axis in AXES)

    @property
    def product(self) -> str:
        """Axis sizes as a product: "tp 2 x pp 2 x dp 4", with cp, replicas, ep and etp if they are above 1."""
        context = f"cp {self.cp} x " if self.cp > 1 else ""
        replicas = f" ({self.dp_replicas} replicas)" if self.dp_replicas > 1 else ""
        return f"tp {self.tp} x {context}pp {self.pp} x dp {self.dp}{replicas}{self._experts(' ')}"

    def __str__(self) -> str:
        context = f" cp={self.cp}" if self.cp > 1 else ""
        chunks = f"vpp={self.vpp}{' in a V' if self.is_v else ''}"
        replicas = f" dp_replicas={self.dp_replicas}" if self.dp_replicas > 1 else ""
        return f"tp={self.tp}{context} pp={self.pp} {chunks} dp={self.dp}{replicas}{self._experts('=')}"

    def _experts(self, sign: str) -> str:
        """Write ep and etp sizes above 1, with `sign` between name and size; "" if none."""
        words = [f"{name}{sign}{size}" for name, size in (("ep", self.ep), ("etp", self.etp)) if size > 1]
        if not words:
            return ""
        return f" {' '.join(words)}" if sign == "=" else f" ({', '.join(words)})"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """One rank's index, from 0, on the pipeline, data-, context- and tensor-parallel axes."""

    pp: int
    dp: int
    cp: int
    tp: int

    def __str__(self) -> str:
        return (
            f"pp {self.pp}, dp {self.dp}, tp {self.tp}"
            if self.cp == 0
            else f"pp {self.pp}, dp {self.dp}, cp {self.cp}, tp {self.tp}"
        )


class RankGrid:
    """All ranks in a layout, with their coordinates, groups and nodes.

    Args:
        sizes: the parallel sizes.
        ranks_per_node: number of ranks that share a node; the whole world if not given.

    Raises:
        TopologyError: the world does not fill whole nodes, or a tensor-parallel group would cross a node boundary and
            `allow_tp_across_nodes` is false.
    """

    def __init__(
        self, sizes: ParallelSizes, ranks_per_node: int | None = None, *, allow_tp_across_nodes: bool = False
    ) -> None:
        self.sizes = sizes
        self.world_size = sizes.world_size
        self.ranks_per_node = min(ranks_per_node or self.world_size, self.world_size)
        if rule := partial_node(self.world_size, self.ranks_per_node):
            raise TopologyError(
                f"{self.world_size} ranks ({sizes}) {rule}. Choose other sizes, or another number per node."
            )
        if not allow_tp_across_nodes and (rule := tp_across_nodes(sizes.tp, self.world_size, self.ranks_per_node)):
            raise TopologyError(
                f"parallel.tp = {sizes.tp} {rule}. Choose another size, or set parallel.allow_tp_across_nodes=true."
            )

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise TopologyError(f"rank {rank} does not exist: {self.sizes} has ranks 0 to {self.world_size - 1}.")
        values = {}
        rest = rank
        for axis in reversed(AXES):
            rest, values[axis] = divmod(rest, self.sizes.size(axis))
        return Coordinates(**values)

    def rank(self, **coordinates: int) -> int:
        """Find the rank at these coordinates; axes that are left out are 0."""
        number = 0
        for axis in AXES:
            at = coordinates.get(axis, 0)
            if not 0 <= at < self.sizes.size(axis):
                raise TopologyError(f"{axis} coordinate {at} does not exist: {axis} has size {self.sizes.size(axis)}.")
            number = number * self.sizes.size(axis) + at
        return number

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """List every group that spans `axes`, as tuples of ranks in rank order, in one global order.

        `groups("tp")` lists the tensor-parallel groups, `groups("dp", "cp")` those that reduce dense gradients, and `groups(*AXES)`
        the world.
        """
        for axis in axes:
            if axis not in AXES:
                raise TopologyError(f"axis {axis!r} does not exist; the axes are {', '.join(AXES)}.")
        fixed = [axis for axis in AXES if axis not in axes]
        free = [axis for axis in AXES if axis in axes]
        return tuple(tuple(self.rank(**where, **inner) for inner in self._walk(free)) for where in self._walk(fixed))

    def end_stage_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each (dp, cp, tp), list the one or two ranks with the first and last stage; a tied embedding is on these."""
        return tuple((group[0], group[-1])[: self.sizes.num_ends] for group in self.groups("pp"))

    def expert_blocks(self) -> tuple[tuple[int, ...], ...]:
        """List each stage's runs of ep x etp ranks that share one set of experts and dispatch tokens to each other."""
        size = self.sizes.expert_ranks
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world_size, size))

    def expert_replicas(self) -> tuple[tuple[int, ...], ...]:
        """List the groups in each stage whose ranks hold the same part of the same experts."""
        stage, size = self.world_size // self.sizes.pp, self.sizes.expert_ranks
        return tuple(
            tuple(range(first + place, first + stage, size))
            for first in range(0, self.world_size, stage)
            for place in range(size)
        )

    def shards(self, axis: ReduceAxis) -> tuple[tuple[int, ...], ...]:
        """List the rank groups that share one copy of the optimizer state. `axis`: dense or expert parameters."""
        groups = self.groups("dp", "cp") if axis == "dp" else self.expert_replicas()
        return _runs(groups, self.sizes.owners(axis))

    def state_replicas(self) -> tuple[tuple[int, ...], ...]:
        """List the groups whose ranks own the same part of the state, one rank for each copy."""
        stage = self.world_size // self.sizes.pp
        block = stage // self.sizes.dp_replicas
        return tuple(
            tuple(range(first + place, first + stage, block))
            for first in range(0, self.world_size, stage)
            for place in range(block)
        )

    def tp_blocks(self, block_size: int) -> tuple[tuple[int, ...], ...]:
        """Cut each tensor-parallel group into runs of `block_size` neighbours.

        With fewer key/value heads than tp ranks, the tp / kv_heads ranks in a run hold replicas of the same head.

        Raises:
            TopologyError: `block_size` does not divide tp.
        """
        if self.sizes.tp % block_size:
            raise TopologyError(
                f"tp={self.sizes.tp} cannot be cut into blocks of {block_size} ranks; some replicas would have no block."
            )
        return _runs(self.groups("tp"), block_size)

    def _walk(self, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        for values in product(*(range(self.sizes.size(axis)) for axis in axes)):
            yield dict(zip(axes, values, strict=True))


def _runs(groups: Sequence[tuple[int, ...]], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(group[start : start + size] for group in groups for start in range(0, len(group), size))
