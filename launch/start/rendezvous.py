"""Let the launchers of a run's nodes meet at a store that listens on one interface.

torchrun's own store listens on all of node 0's interfaces, and no signal ends the wait for other nodes. So a launcher that runs
torchrun in its process replaces the store by ours. A launch line from --dry-run, typed by hand, uses torchrun's own store.

    node 0        opens the store             waits for the others    "waiting for node 2 of 0 .. 3 at 10.0.0.1 port 29500"
    other nodes   wait for node 0's port      wait for the others
"""

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from triaxis.engine.comm.network import Interface, cluster_interface
from triaxis.engine.comm.runtime import open_store
from triaxis.engine.errors import ExitCode, TopologyError, counted

BACKEND = "triaxis"

TIMEOUT = timedelta(minutes=15)
"""Longest time between the starts of a job's nodes."""

POLL_SECONDS = 0.2
QUIET_SECONDS = 3.0
"""Time before the first message; nodes that start together meet sooner, and nothing is printed."""
SAY_AGAIN_SECONDS = 60.0
_SHOWN = 8
"""Maximum number of nodes to name one by one."""


class NodesMissingError(TopologyError):
    """Nodes did not come, or their meeting place is gone. The same command may succeed later."""

    exit_code = ExitCode.BROKE


class MeetingPlace:
    """The store at which a run's launchers and ranks meet.

    The store stays open from phase to phase, because launchers on other nodes may be in another phase and still need it.
    """

    def __init__(self) -> None:
        self._num_uses = 0
        self._store: TCPStore | None = None

    def use(self, words: argparse.Namespace) -> None:
        """Change torchrun's parsed arguments, `words`, so that the nodes meet at this store."""
        # torch's registry accepts a name once per process, and another meeting place has another store.
        backend = f"{BACKEND}_{id(self):x}"
        rendezvous_handler_registry.register(backend, self._create)
        host, port = (words.local_addr, 0) if words.standalone else (words.master_addr, words.master_port)
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        words.standalone = False
        words.rdzv_backend, words.rdzv_endpoint, words.rdzv_conf = backend, endpoint, f"node={words.node_rank}"
        words.node_rank = 0  # torchrun would warn that this backend does not read it
        words.rdzv_id = f"stage_{self._num_uses}"
        self._num_uses += 1

    def _create(self, parameters: RendezvousParameters) -> RendezvousHandler:
        host, port = parse_rendezvous_endpoint(parameters.endpoint, 0)
        num_nodes, node = parameters.max_nodes, int(parameters.config["node"])
        interface = cluster_interface(host, several_nodes=num_nodes > 1, variables=os.environ)
        if self._store is None:
            if node != 0:
                wait_for(lambda: [] if _listens(host, port) else [0], num_nodes, f"{host} port {port}")
            self._store = open_store(interface, port, TIMEOUT, is_server=node == 0)
        return _OneInterface(parameters.backend, interface, self._store, node, num_nodes, parameters.run_id)


class _OneInterface(RendezvousHandler):
    """A torchrun rendezvous for a fixed number of nodes. Node 0 serves the store."""

    def __init__(
        self, backend: str, interface: Interface, store: TCPStore, node: int, num_nodes: int, run_id: str
    ) -> None:
        self._backend = backend
        self._interface = interface
        self._store = store
        self._node = node
        self._num_nodes = num_nodes
        self._run_id = run_id

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        prefixed = PrefixStore(self._run_id, self._store)
        self._meet(prefixed)
        where = RendezvousStoreInfo(self._interface.store_host, self._store.port)
        return RendezvousInfo(prefixed, self._node, self._num_nodes, where)

    def _meet(self, store: PrefixStore) -> None:
        """Announce this node at the store, and wait for all nodes' launchers.

        Raises:
            NodesMissingError: a node does not come, or node 0 is gone.
        """
        keys = [f"here/{node}" for node in range(self._num_nodes)]

        def missing() -> list[int]:
            if store.check(keys):
                return []
            return [node for node, key in enumerate(keys) if not store.check([key])]

        where = f"{self._interface.store_host} port {self._store.port}"
        try:
            store.set(keys[self._node], "")
            wait_for(missing, self._num_nodes, where)
        except NodesMissingError:
            raise
        except RuntimeError as error:
            raise NodesMissingError(
                f"node 0 has left the meeting place ({where}) before all nodes were there, so no rank was started here. Its own "
                "output says why; then start all nodes again."
            ) from error

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing, because a group of fixed nodes does not change."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def wait_for(
    missing: Callable[[], Sequence[int]], num_nodes: int, where: str, limit_seconds: float = TIMEOUT.total_seconds()
) -> None:
    """Wait until no node is missing. A signal can end the wait.

    The missing nodes are printed after `QUIET_SECONDS`, then each minute.

    Args:
        missing: function () -> numbers of missing nodes.
        where: meeting place, for messages.
        limit_seconds: limit for the whole wait.

    Raises:
        NodesMissingError: nodes are still missing after the limit.
    """
    began, say_at = time.monotonic(), QUIET_SECONDS
    while absent := missing():
        waited = time.monotonic() - began
        names = f"{'node' if len(absent) == 1 else 'nodes'} {', '.join(map(str, absent[:_SHOWN]))}"
        names += f" and {len(absent) - _SHOWN:,} more" if len(absent) > _SHOWN else ""
        if waited > limit_seconds:
            raise NodesMissingError(
                f"{names} of {counted(num_nodes, 'node')} did not come to {where} within {limit_seconds:,.0f} seconds, so no rank "
                "was started. Start the same command there, with its own NODE_RANK and the same NNODES, MASTER_ADDR and "
                "MASTER_PORT; a firewall between the nodes looks the same."
            )
        if waited >= say_at:
            say_at = waited + SAY_AGAIN_SECONDS
            text = f"waiting for {names} (of 0 .. {num_nodes - 1}) at {where}, since {waited:.0f} s; Ctrl-C ends it"
            print(text, file=sys.stderr, flush=True)
        time.sleep(POLL_SECONDS)


def _listens(host: str, port: int) -> bool:
    """Whether anything listens at this address."""
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False
