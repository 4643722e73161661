"""This rank's place in the grid, and its live groups.

A `Topology` is built from a `RankGrid` and an initialised default process group; nothing else holds groups, and two
topologies can live in one process. Axes by name:

    tp            the peers that share each matrix
    dp            dense gradients are summed here: the data-parallel (and context-parallel) ranks
    pp            all stages of this pipeline (small collectives)
    pp_forward    activations; a communicator of its own, so that the two directions never wait for each other
    pp_backward   gradients of activations
    ends          first and last stage: the two holders of a tied embedding; only on those stages
    kv_replicas   the tp ranks that hold the same key/value head; only where kv heads < tp
    world         everybody

Groups with the same ranks share one process group, except the two pipeline directions. Where gloo serves a GPU, each process
group has its staging (`engine.staging`).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from engine.collectives import Axis, Ledger
from engine.errors import TopologyError
from engine.rank_grid import AXES, RankGrid
from engine.staging import Carrier, Staging


def axis_groups(grid: RankGrid, kv_heads: int | None) -> Iterator[tuple[str, Sequence[tuple[int, ...]], str]]:
    """(name, groups of ranks, channel) of each axis, in the order of creation; equal ranks and channel are one process group."""
    yield "world", [tuple(range(grid.world_size))], ""
    yield "tp", grid.groups("tp"), ""
    yield "dp", grid.groups("dp", "cp"), ""
    yield "pp", grid.groups("pp"), ""
    yield "pp_forward", grid.groups("pp"), "forward"
    yield "pp_backward", grid.groups("pp"), "backward"
    yield "ends", grid.end_stage_groups(), ""
    if kv_heads is not None and kv_heads < grid.sizes.tp:
        yield "kv_replicas", grid.tp_blocks(grid.sizes.tp // kv_heads), ""


class Topology:
    """The groups of one rank.

    Args:
        grid: all ranks of the layout.
        rank: this rank.
        device: where this rank computes.
        kv_heads: key/value heads of the model; with fewer than tp ranks, replicas share a `kv_replicas` axis.
        staged: carry tensors through host memory; None: where the default group is gloo's and this rank is on a GPU.
        carrier: makes the carrier of a process group, from the name of its first axis and the ledger; for who watches calls.

    Attributes:
        staged: whether it does.

    Raises:
        TopologyError: the default process group has another size than the grid.
    """

    def __init__(
        self,
        grid: RankGrid,
        rank: int,
        device: torch.device,
        *,
        kv_heads: int | None = None,
        staged: bool | None = None,
        carrier: Callable[[str, Ledger], Carrier] | None = None,
    ) -> None:
        if grid.world_size > 1 and dist.get_world_size() != grid.world_size:
            raise TopologyError(
                f"{dist.get_world_size()} ranks were started, but {grid.sizes} needs {grid.world_size}: some ranks would "
                f"belong to no group. Start {grid.world_size} ranks, or change the parallel sizes."
            )
        self.grid = grid
        self.rank = rank
        self.device = device
        self.sizes = grid.sizes
        self.coordinates = grid.coordinates(rank)
        self.ledger = Ledger()
        if staged is None:
            staged = grid.world_size > 1 and device.type == "cuda" and dist.get_backend() == "gloo"
        self.staged = staged
        self._make_carrier = carrier or ((lambda name, ledger: Staging(device)) if staged else None)
        self._carriers: dict[dist.ProcessGroup, Carrier] = {}
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self._axes: dict[str, Axis] = {}

        for name, groups, channel in axis_groups(grid, kv_heads):
            self._add(name, groups, channel)

    def _add(self, name: str, groups: Sequence[tuple[int, ...]], channel: str) -> None:
        """Create this rank's group of the axis; every rank walks the axes in the same order."""
        ranks = next((ranks for ranks in groups if self.rank in ranks), None)
        if ranks is None:
            return
        group, carrier = None, None
        if len(ranks) > 1:
            key = (ranks, channel)
            if key not in self._groups:
                created = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)
                assert isinstance(created, dist.ProcessGroup)
                self._groups[key] = created
            group = self._groups[key]
            # One for all axes of a process group: its calls have one order.
            if self._make_carrier is not None and group not in self._carriers:
                self._carriers[group] = self._make_carrier(name, self.ledger)
            carrier = self._carriers.get(group)
        self._axes[name] = Axis(name, ranks, self.rank, group, self.ledger, carrier)
        self._axes[name].connect(self.device)

    def axis(self, name: str) -> Axis:
        """The axis of this name; raises TopologyError where this rank has none."""
        axis = self.maybe_axis(name)
        if axis is None:
            raise TopologyError(
                f"rank {self.rank} ({self.coordinates}) has no axis {name!r}; it has {', '.join(self._axes)}. "
                f"Mesh axes are {', '.join(AXES)}; 'ends' exists on the first and last stage, 'kv_replicas' where kv heads < tp."
            )
        return axis

    def maybe_axis(self, name: str) -> Axis | None:
        """The axis of this name, or None where this rank has none."""
        return self._axes.get(name)

    def close(self) -> None:
        """Destroy the groups of this topology (not torch's default group)."""
        for axis in self._axes.values():
            axis.close()
        for carrier in self._carriers.values():
            carrier.close()
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._carriers.clear()
        self._groups.clear()
        self._axes.clear()
