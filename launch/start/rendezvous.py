"""The meeting place of the launchers of a run's nodes: torchrun's static rendezvous, with a store that listens on one interface.

torchrun's own listens on every interface of node 0. This one replaces it in our launcher's process; the line that the launcher
prints starts the same ranks with torchrun's own.
"""

import argparse
import os
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

BACKEND = "triaxis"

TIMEOUT = timedelta(minutes=15)
"""The longest time between the starts of a job's nodes."""


class MeetingPlace:
    """The store of a run's launchers, which the ranks use as well; it stays over the phases of the run.

    The launchers of other nodes may be a stage ahead or behind: a store that ended with each stage would be found half gone.
    """

    def __init__(self) -> None:
        self._num_uses = 0
        self._store: TCPStore | None = None

    def use(self, words: argparse.Namespace) -> None:
        """Replace the rendezvous in torchrun's parsed arguments by this one; each use has keys of its own in the store."""
        # The registry of torch takes a name once in a process, and another place has another store.
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
            self._store = open_store(interface, port, TIMEOUT, is_server=node == 0)
        return _OneInterface(parameters.backend, interface, self._store, node, num_nodes, parameters.run_id)


class _OneInterface(RendezvousHandler):
    """A rendezvous of numbered nodes; node 0 has the store, and the ranks use it as well."""

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
        where = RendezvousStoreInfo(self._interface.store_host, self._store.port)
        return RendezvousInfo(prefixed, self._node, self._num_nodes, where)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: a group of fixed nodes does not change."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
