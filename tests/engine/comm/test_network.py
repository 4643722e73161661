"""Which interface leads to the other ranks, and that nothing of a run listens on another one."""

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from tests import netns
from tests.harness import run_ranks
from triaxis.engine.comm.network import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    Interface,
    cluster_interface,
    interface_variables,
    listening_socket,
)
from triaxis.engine.comm.runtime import RankEnvironment, start
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.schema.run import RuntimeConfig
from triaxis.engine.errors import PortTakenError, TopologyError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.launch.start import rendezvous

LOOPBACK_NAME = next(
    name for name, own in psutil.net_if_addrs().items() if any(one.address == "127.0.0.1" for one in own)
)


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say which interfaces this machine has."""

    def say(**addresses: str) -> None:
        found = {name: [SimpleNamespace(family=socket.AF_INET, address=one)] for name, one in addresses.items()}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=True) for name in found})

    return say


def chosen(master: str, variables: Mapping[str, str] | None = None, *, several_nodes: bool = True) -> Interface:
    return cluster_interface(master, several_nodes=several_nodes, variables=variables or {})


def test_one_node_stays_on_the_loopback() -> None:
    assert chosen("127.0.0.1", several_nodes=False) == Interface(LOOPBACK_NAME, "127.0.0.1", "127.0.0.1")


def test_a_name_that_is_a_loopback_address_at_home_means_the_only_interface(interfaces: Any) -> None:
    """As where /etc/hosts says that this machine's own name is 127.0.1.1."""
    interfaces(lo="127.0.0.1", eth0="10.0.0.7", docker0="172.17.0.1")
    assert chosen("localhost") == Interface("eth0", "10.0.0.7", "10.0.0.7")


def test_of_several_interfaces_the_user_chooses(interfaces: Any) -> None:
    interfaces(lo="127.0.0.1", eth0="10.0.0.7", ib0="10.1.0.7")
    with pytest.raises(TopologyError, match=r"eth0 \(10\.0\.0\.7\), ib0 \(10\.1\.0\.7\).*NCCL_SOCKET_IFNAME"):
        chosen("localhost")
    for variable, value in ((GLOO_VARIABLE, "ib0"), (NCCL_VARIABLE, "=ib0")):
        assert chosen("localhost", {variable: value}).name == "ib0"


def test_a_loopback_address_itself_is_meant(interfaces: Any) -> None:
    interfaces(lo="127.0.0.1", eth0="10.0.0.7", ib0="10.1.0.7")
    assert chosen("127.0.1.1") == Interface("lo", "127.0.1.1", "127.0.1.1")


def test_no_interface_at_all(interfaces: Any) -> None:
    interfaces(lo="127.0.0.1")
    with pytest.raises(TopologyError, match=r"interfaces \(none\)"):
        chosen("localhost")


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(TopologyError, match=r"no-such-host\.invalid does not resolve"):
        chosen("no-such-host.invalid")


def test_what_the_user_set_is_kept() -> None:
    interface = Interface("eth0", "10.0.0.7", "node0")
    assert interface_variables(interface, {}) == {GLOO_VARIABLE: "eth0", NCCL_VARIABLE: "=eth0"}
    assert interface_variables(interface, {NCCL_VARIABLE: "eth"}) == {GLOO_VARIABLE: "eth0"}


def test_a_port_that_is_taken_is_said() -> None:
    interface = Interface(LOOPBACK_NAME, "127.0.0.1", "127.0.0.1")
    with listening_socket(interface, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"cannot listen at 127\.0\.0\.1 port {port}.*MASTER_PORT"):
            listening_socket(interface, port)


# On hosts with two interfaces ------------------------------------------------------------------------------------------

CLUSTER, OTHER = "10.77.0.", "10.99.0."


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with netns.hosts(2) as names:
        for index, name in enumerate(names):
            netns.add_interface(name, "eth1", f"{OTHER}{index + 1}")
        yield names


def listening() -> set[str]:
    found = psutil.Process().net_connections(kind="inet")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN}


def on_host(rank: int, hosts: Sequence[str]) -> None:
    dist.barrier()  # a rank that leaves while another still connects would end that one
    dist.destroy_process_group()
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch asks for names, and there is no name server
    netns.enter(hosts[rank])
    for variable in (GLOO_VARIABLE, NCCL_VARIABLE):
        os.environ.pop(variable, None)


def listeners_of_ranks(rank: int, hosts: Sequence[str]) -> tuple[set[str], dict[str, str]]:
    """As srun starts them, a rank a host: store, default group, a topology's groups."""
    on_host(rank, hosts)
    environment = RankEnvironment(rank, 2, 0, 1, f"{CLUSTER}1", 29_500)
    runtime = start(environment, RuntimeConfig(device="cpu", timeout_seconds=60))
    topology = Topology(RankGrid(ParallelSizes(pp=2), 1), rank, runtime.device)
    found = listening()
    topology.axis("world").all_reduce(torch.ones(1), "test").wait()
    topology.close()
    runtime.close()
    return found, {name: os.environ[name] for name in (GLOO_VARIABLE, NCCL_VARIABLE)}


def listeners_of_launchers(rank: int, hosts: Sequence[str]) -> tuple[set[str], str, bytes]:
    """As `triaxis train` starts a node: the rendezvous that stands in torchrun's place."""
    on_host(rank, hosts)
    words = SimpleNamespace(
        standalone=False, local_addr=None, master_addr=f"{CLUSTER}1", master_port=29_501, node_rank=rank
    )
    rendezvous.MeetingPlace().use(words)  # type: ignore[arg-type]
    name, _, value = words.rdzv_conf.partition("=")
    parameters = RendezvousParameters(words.rdzv_backend, words.rdzv_endpoint, "run", 2, 2, **{name: value})
    handler = get_rendezvous_handler(parameters)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (rank, 2)
    info.store.set(f"node{rank}", f"hello from {rank}")
    heard = info.store.get(f"node{1 - rank}")
    found = listening()
    # Node 0 has the store: it leaves last.
    if rank == 1:
        info.store.set("done", "")
    else:
        info.store.get("done")
    return found, info.bootstrap_store_info.master_addr, heard


@pytest.mark.distributed
def test_ranks_listen_on_the_interface_that_leads_to_rank_0_and_on_no_other(hosts: list[str]) -> None:
    for rank, (found, variables) in enumerate(run_ranks(listeners_of_ranks, 2, hosts)):
        assert found == {f"{CLUSTER}{rank + 1}"}
        assert variables == {GLOO_VARIABLE: netns.LINK, NCCL_VARIABLE: f"={netns.LINK}"}


@pytest.mark.distributed
def test_the_launchers_store_listens_on_the_cluster_interface_only(hosts: list[str]) -> None:
    first, second = run_ranks(listeners_of_launchers, 2, hosts)
    assert first == ({f"{CLUSTER}1"}, f"{CLUSTER}1", b"hello from 1")
    assert second == (set(), f"{CLUSTER}1", b"hello from 0")
