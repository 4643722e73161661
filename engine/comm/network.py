"""Finds the network interface to the other ranks, and opens listening sockets only there.

A node's cluster interface is the one over which it reaches MASTER_ADDR. A single-node run meets at 127.0.0.1, so all its traffic
stays on the loopback interface. The steps from the name to the sockets:

    MASTER_ADDR ->  address to talk from   the kernel's route; no packet is sent
                ->  interface              for gloo's and NCCL's sockets, unless the user has set their variables
                ->  listening socket       for the store on rank 0's node; torch's own would listen on every interface

The sockets ask for no password. Any program that reaches the store can end or mislead the run.
"""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from triaxis.engine.errors import PortTakenError, TopologyError

GLOO_VARIABLE = "GLOO_SOCKET_IFNAME"
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"

_INSIDE = ("docker", "veth", "virbr", "br-", "cni")
"""Name prefixes for interfaces that lead to this node's containers and virtual machines, not to other nodes."""

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True, slots=True)
class Interface:
    """The network interface through which this node communicates.

    Attributes:
        name: interface name, such as eth0.
        address: the interface's IP address that the run uses.
        store_host: host name or address at which this node reaches rank 0's store.
    """

    name: str
    address: str
    store_host: str


def cluster_interface(master_addr: str, *, several_nodes: bool, variables: Mapping[str, str]) -> Interface:
    """Find the interface over which this node reaches the other ranks.

    Args:
        master_addr: name or address at which the ranks meet.
        several_nodes: whether ranks run on other nodes too. Other nodes cannot reach a name that resolves to a loopback address
            here. The result is then the interface that `variables` names, or else the only one that leads out of the node. A
            `master_addr` that is itself a loopback address is used as given.
        variables: environment, in which GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME may be set.

    Raises:
        TopologyError: the name does not resolve, there is no route to it, or no single interface qualifies.
    """
    addresses = _addresses()
    source = _route(master_addr)
    is_loopback = ipaddress.ip_address(source).is_loopback
    if several_nodes and is_loopback and source != master_addr:
        return _chosen(master_addr, addresses, variables)
    for name, own in addresses.items():
        if source in own or (is_loopback and _is_loopback(own)):
            return Interface(name, source, master_addr)
    raise TopologyError(
        f"MASTER_ADDR={master_addr} is reached from {source}, and no interface of this node has that address; the groups would "
        f"not know where to listen. Set MASTER_ADDR to an address of rank 0's node on the cluster's network."
    )


def interface_variables(interface: Interface, variables: Mapping[str, str]) -> dict[str, str]:
    """Build the environment variables that tell gloo and NCCL the interface.

    Variables that the user has set are left out. NCCL's value is `=NAME`, since NCCL would read a bare name as a prefix.
    """
    wanted = {GLOO_VARIABLE: interface.name, NCCL_VARIABLE: f"={interface.name}"}
    return {name: value for name, value in wanted.items() if not variables.get(name)}


def listening_socket(interface: Interface, port: int) -> socket.socket:
    """Open a socket that listens at the interface's address only.

    The caller must close it or pass its descriptor to an owner.

    Args:
        port: port number; 0 picks a free one.

    Raises:
        PortTakenError: the port cannot be bound, usually because another process listens there.
    """
    family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # A port that this run's last attempt left in TIME_WAIT counts as free.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((interface.address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise PortTakenError(
            f"rank 0 cannot listen at {interface.address} port {port} ({interface.name}): {error.strerror}. The other ranks would "
            f"wait there in vain. Another run may use the port: set MASTER_PORT to a free one."
        ) from error
    return listener


def _route(host: str) -> str:
    """Find the address from which this node talks to `host`.

    If `host` is this node itself, the result is the host's own address.

    Raises:
        TopologyError: the name does not resolve, or there is no route to it.
    """
    try:
        found = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)
    except socket.gaierror as error:
        raise TopologyError(
            f"MASTER_ADDR={host} does not resolve on {socket.gethostname()}: {error.strerror}. Its ranks would wait alone until "
            f"the timeout. Give a name that all nodes know, or an address."
        ) from error
    found = [one for family in _FAMILIES for one in found if one[0] == family]
    problem = "it has no IP address"
    for family, _, _, _, address in found:
        if ipaddress.ip_address(address[0]).is_loopback:
            return str(address[0])
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
                return str(probe.getsockname()[0])
            except OSError as error:
                problem = str(error.strerror)
    raise TopologyError(
        f"MASTER_ADDR={host} cannot be reached from {socket.gethostname()}: {problem}. Its ranks would wait alone until the "
        f"timeout. Give an address on a network that all nodes are on."
    )


def _addresses() -> dict[str, list[str]]:
    """List the IP addresses by interface, for interfaces that are up."""
    states = psutil.net_if_stats()
    return {
        name: [one.address.partition("%")[0] for one in own if one.family in _FAMILIES]
        for name, own in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }


def _is_loopback(addresses: list[str]) -> bool:
    return any(ipaddress.ip_address(address).is_loopback for address in addresses)


def _chosen(master_addr: str, addresses: Mapping[str, list[str]], variables: Mapping[str, str]) -> Interface:
    """Choose this node's interface to the other nodes, because MASTER_ADDR resolves to a loopback address.

    The result is the interface named in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME. Otherwise it is the only one that leads out of
    the node.

    Raises:
        TopologyError: several interfaces lead out, or none does.
    """
    named = [variables.get(name, "").removeprefix("=") for name in (GLOO_VARIABLE, NCCL_VARIABLE)]
    outward = {
        name: own
        for name, own in addresses.items()
        if own and not _is_loopback(own) and (name in named or not name.startswith(_INSIDE))
    }
    for name in named:
        if name in outward:
            return Interface(name, outward[name][0], store_host=outward[name][0])
    if len(outward) == 1:
        ((name, own),) = outward.items()
        return Interface(name, own[0], store_host=own[0])
    candidates = ", ".join(f"{name} ({own[0]})" for name, own in outward.items()) or "none"
    raise TopologyError(
        f"MASTER_ADDR={master_addr} is a loopback address on {socket.gethostname()}, and other nodes have to reach it; of its "
        f"interfaces ({candidates}) none is certain to be the cluster's. Set MASTER_ADDR to the address itself, or name the "
        f"interface in {GLOO_VARIABLE} and {NCCL_VARIABLE}."
    )
