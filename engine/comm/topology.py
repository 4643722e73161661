"""Creates this rank's process groups, as named axes of the grid.

A `Topology` is built from a `RankGrid` and an initialised default process group. Nothing else holds groups, and two
topologies can live in one process. Axes by name:

    tp            the peers that share each matrix
    cp            the peers that share each sample's tokens: keys and values are gathered here
    dp            dense gradients are summed here: the data-parallel (and context-parallel) ranks
    pp            all stages of this pipeline (small collectives); connected by its first user, generation
    pp_forward    activations; a communicator of its own, so that the two directions never wait for each other
    pp_backward   gradients of activations
    ends          first and last stage: the two holders of a tied embedding; only on those stages
    kv_replicas   the tp ranks that hold the same key/value head; only where kv heads < tp
    sample        the ranks that share each sample's tokens, cp x tp; this and the next two only in models with experts
    experts       the ranks that share a set of experts, ep x etp: tokens are dispatched here
    expert_dp     gradients of experts are summed here
    dp_shard      in place of dp if the state has replicas: ranks that own a part each; expert_dp_shard likewise
    dp_replicas   ranks that own the same part in different replicas
    world         all ranks

Groups with the same ranks share one process group, except the two pipeline directions. If gloo serves a GPU, each process
group has its own staging (`triaxis.engine.comm.staging`).

All connections that a step uses are opened here, so that no call in a step blocks the host to connect.
"""

from collections.abc import Callable, Sequence
from copy import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import Ledger, WaitObserver
from triaxis.engine.comm.staging import Carrier, Staging
from triaxis.engine.comm.store_agreement import compare_group_counts
from triaxis.engine.errors import TopologyError
from triaxis.engine.layout.axis_groups import (
    AXIS_NAMES,
    CONNECTED_LATER,
    OF_EXPERTS,
    OF_REPLICAS,
    StreamUse,
    axis_groups,
    stream_use,
)
from triaxis.engine.layout.rank_grid import RankGrid


def group_options(axes: Sequence[str], timeout: timedelta | None) -> Any:
    """Build NCCL's options for the process group that the named axes share; None on other backends."""
    if dist.get_backend() != "nccl":
        return None
    # torch builds without NCCL lack this class.
    from torch._C._distributed_c10d import ProcessGroupNCCL

    return nccl_options(stream_use(axes), timeout, ProcessGroupNCCL.Options)


def nccl_options(use: StreamUse, timeout: timedelta | None, make: Any) -> Any:
    """Build options for torch's NCCL backend, with a group's stream use and timeout; `make` is the options class."""
    options = make(is_high_priority_stream=use.is_urgent)
    if use.max_ctas is not None:
        options.config.max_ctas = use.max_ctas
    if timeout is not None:
        options._timeout = timeout
    return options


class Topology:
    """One rank's process groups, as axes.

    A caller asks for an axis by name; the grid and the model decide which ranks it joins (`axis_groups`). All ranks walk the axes
    in one order, because a group's members must create it and open its connections at the same point. A one-rank axis exists and
    does nothing. An axis that has no meaning for this rank is absent, so a wrong use fails at the look-up. If it were a one-rank
    axis instead, a sum over it would silently be left out.

    Args:
        grid: all ranks in the layout.
        kv_heads: the model's number of key/value heads; if it is below tp, replicas share a `kv_replicas` axis.
        has_experts: whether the model has layers with experts.
        staged: whether calls copy tensors through host memory; None: yes if the default group is gloo's and this rank is on a GPU.
        timeout: time limit for a call on any group; None: torch's default for the backend.

    Attributes:
        staged: whether calls copy tensors through host memory.

    Raises:
        TopologyError: the default process group and the grid differ in size, or ranks have created different numbers of groups.
    """

    def __init__(
        self,
        grid: RankGrid,
        rank: int,
        device: torch.device,
        *,
        kv_heads: int | None = None,
        has_experts: bool = False,
        staged: bool | None = None,
        timeout: timedelta | None = None,
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
        self._carriers: dict[dist.ProcessGroup, Carrier] = {}
        self._before_close: list[Callable[[], None]] = []
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self._axes: dict[str, Axis] = {}

        compare_group_counts()
        mine: list[tuple[str, tuple[int, ...], str]] = []
        for name, groups, channel in axis_groups(grid, kv_heads, has_experts=has_experts):
            ranks = next((ranks for ranks in groups if rank in ranks), None)
            if ranks is not None:
                mine.append((name, ranks, channel))
        sharers: dict[tuple[tuple[int, ...], str], list[str]] = {}
        for name, ranks, channel in mine:
            sharers.setdefault((ranks, channel), []).append(name)
        for name, ranks, channel in mine:
            self._add(name, ranks, channel, sharers[ranks, channel], timeout)

    def _add(
        self, name: str, ranks: tuple[int, ...], channel: str, sharers: Sequence[str], timeout: timedelta | None
    ) -> None:
        """Create the axis `name`, and its process group unless an earlier axis has created the group.

        Axes with the same ranks and `channel` share a group; `sharers` names them all. `channel` is `forward` or `backward` for the
        pipeline's messages, else empty.
        """
        group, carrier = None, None
        if len(ranks) > 1:
            key = (ranks, channel)
            if key not in self._groups:
                created = dist.new_group(
                    list(ranks),
                    timeout=timeout,
                    pg_options=group_options(sharers, timeout),
                    use_local_synchronization=True,
                    group_desc=name,
                )
                assert isinstance(created, dist.ProcessGroup)
                self._groups[key] = created
            group = self._groups[key]
            # One for all axes on a process group, because its calls have one order.
            if self.staged and group not in self._carriers:
                self._carriers[group] = Staging(self.device)
            carrier = self._carriers.get(group)
        self._axes[name] = Axis(name, ranks, self.rank, group, self.ledger, carrier)
        if name not in CONNECTED_LATER:
            self._axes[name].connect(self.device)
        if channel:
            self._axes[name].connect_ring(self.device)

    def axis(self, name: str) -> Axis:
        """Return the axis `name`.

        Raises:
            TopologyError: this rank has no such axis.
        """
        axis = self.optional_axis(name)
        if axis is None:
            raise TopologyError(
                f"rank {self.rank} ({self.coordinates}) has no axis {name!r}; it has {', '.join(self._axes)}. "
                "'ends' exists on the first and last stage, 'kv_replicas' where kv heads < tp, "
                f"{', '.join(OF_EXPERTS)} in models with experts, {', '.join(OF_REPLICAS)} if parallel.dp_replicas > 1."
            )
        return axis

    def optional_axis(self, name: str) -> Axis | None:
        """Return the axis `name`, or None if this rank has none.

        Raises:
            TopologyError: no layout has such an axis.
        """
        if name not in AXIS_NAMES:
            raise TopologyError(f"there is no axis {name!r} in any layout; the axes are {', '.join(AXIS_NAMES)}.")
        return self._axes.get(name)

    def observed(self, observers: Sequence[WaitObserver]) -> "Topology":
        """Return a copy of this topology with a ledger of its own, which reports calls, waits and host reads to `observers`.

        The copy shares the groups; only the original closes them.
        """
        topology = copy(self)
        topology.ledger = Ledger(observers)
        topology._axes = {name: axis.with_ledger(topology.ledger) for name, axis in self._axes.items()}
        topology._groups, topology._carriers = {}, {}
        return topology

    def before_close(self, call: Callable[[], None]) -> None:
        """Register a function to be called before the groups are destroyed, by this topology or the one that it observes."""
        self._before_close.append(call)

    def close(self) -> None:
        """Destroy this topology's groups (not torch's default group)."""
        for call in self._before_close:
            call()
        for axis in self._axes.values():
            axis.close()
        for carrier in self._carriers.values():
            carrier.close()
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._carriers.clear()
        self._groups.clear()
        self._axes.clear()
