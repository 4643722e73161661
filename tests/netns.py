"""Several hosts on one machine: network namespaces whose links count every byte that leaves a host.

    host 0 (namespace)                 switch (namespace)                 host 1 (namespace)
    lo     between its own ranks                                          lo
    eth0   10.77.0.1 ================= port0  bridge  port1 ============= eth0   10.77.0.2

Nothing stands in the machine's own namespace and nothing leads out of these: all that a link carries was sent by the
ranks of one test. IPv6 is off, so an idle link is silent. `shape` makes a host's link slow in the direction that leads out.

A rank enters its host after the harness's default group has met on the machine's own network. That group stays there,
and so do its barriers; the groups that are made afterwards (a `Topology`'s) are connected over eth0.
"""

import ctypes
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from tests.lacking import give_up

INSIDE = "lo"
"""The interface of a host that carries what its own ranks send to each other."""

LINK = "eth0"
"""The interface of a host that leads to the other hosts."""

_HEADER_BYTES = {
    LINK: 14 + 20 + 32,  # Ethernet, IPv4, TCP with timestamps (the default of every new namespace)
    INSIDE: 20 + 32,  # the loopback counts a packet after its Ethernet header is off
}
_PATIENT_TCP = {"tcp_sack": 0, "tcp_reordering": 300}
"""A virtual link loses nothing, but packets that two cores send overtake each other on it. TCP takes that for a loss at the
first selective acknowledgement, or at the third that names an old packet, and sent up to 64 KiB again in every third
measurement of 4 MiB. Hence none of the former, and 300 of the latter (`tcp_max_reordering`, the kernel's ceiling)."""
_PATIENCE = "30s"
"""Nor is an answer lost that a busy machine gives late."""
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000  # from <linux/sched.h>; Python has os.setns, os.unshare and their constants from 3.12 on
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_REC, _MS_PRIVATE = 0x1, 0x4000, 0x40000  # from <sys/mount.h>


@contextmanager
def hosts(num_hosts: int) -> Iterator[list[str]]:
    """Make hosts that reach each other through a switch, and remove them at the end, whatever happened.

    Yields the names to hand to `enter`; they differ between runs, so parallel runs do not meet. Where hosts cannot be
    made the test gives up (tests/lacking.py).
    """
    if shutil.which("ip") is None:
        _give_up("the command `ip` is missing (apt-get install iproute2)")
    if os.geteuid() != 0:
        _give_up("only root may make network namespaces")
    prefix = f"triaxis-{os.getpid()}-{secrets.token_hex(2)}"
    names = [f"{prefix}-host{index}" for index in range(num_hosts)]
    with ExitStack() as made:
        try:
            _make(made, f"{prefix}-switch", names)
        except subprocess.CalledProcessError as error:
            _give_up(f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}")
        yield names


def exists(host: str) -> bool:
    return (_NAMESPACES / host).exists()


def enter(host: str) -> None:
    """Move the calling thread, and what it starts from now on, to this host; new gloo groups will use its link.

    `socket.gethostname()` is the host's name from now on.

    Raises:
        OSError: the kernel refused.
    """
    namespace = os.open(_NAMESPACES / host, os.O_RDONLY)
    try:
        _system_call("setns", namespace, _CLONE_NEWNET)
        _system_call("unshare", _CLONE_NEWUTS)
    finally:
        os.close(namespace)
    socket.sethostname(host)
    os.environ["GLOO_SOCKET_IFNAME"] = LINK


def mount_another_disk(folder: Path, *, read_only: bool = False, num_bytes: int | None = None) -> None:
    """From now on the calling thread, and what it starts, finds an empty disk there, and they alone; its size may be given.

    Raises:
        OSError: the kernel refused.
    """
    _system_call("unshare", _CLONE_NEWNS)
    _system_call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    options = None if num_bytes is None else f"size={num_bytes}".encode()
    _system_call("mount", b"none", os.fsencode(folder), b"tmpfs", _MS_RDONLY if read_only else 0, options)


def _system_call(name: str, *arguments: int | bytes | None) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def shape(host: str, megabits: int) -> None:
    """Let this host send so many megabits per second over its link, from now on. What it receives is not touched."""
    # The kernel hands packets of up to 64 KiB to the link: the bucket must hold some. The queue is longer than any TCP window:
    # a packet that is dropped would be sent again after _PATIENCE.
    words = ["dev", LINK, "root", "tbf", "rate", f"{megabits}mbit", "burst", "128kb", "limit", "64mb"]
    _run("tc", "-n", host, "qdisc", "replace", *words)


def unshape(host: str) -> None:
    """Take the limit of `shape` away."""
    _run("tc", "-n", host, "qdisc", "delete", "dev", LINK, "root")


def cut(host: str) -> None:
    """Take this host's port of the switch down: nothing reaches it and nothing leaves it, and no connection is told so."""
    _set_port(host, "down")


def mend(host: str) -> None:
    """Take the port up again."""
    _set_port(host, "up")


def _set_port(host: str, state: str) -> None:
    prefix, _, index = host.rpartition("-host")
    _ip("-n", f"{prefix}-switch", "link", "set", f"port{index}", state)


def add_interface(host: str, name: str, address: str) -> None:
    """Give this host another interface, which leads nowhere."""
    _ip("-n", host, "link", "add", name, "type", "veth", "peer", "name", f"{name}-peer")
    for end in (name, f"{name}-peer"):
        _ip("-n", host, "link", "set", end, "addrgenmode", "none", "up")
    _ip("-n", host, "address", "add", f"{address}/24", "dev", name)


def sent_bytes(interface: str) -> int:
    """What the host of the calling thread has sent over this interface so far, in bytes, without the packets' headers.

    What is left is TCP's payload: data and gloo's own message headers. The kernel
    hands packets of up to 64 KiB to a virtual link whole, so headers and acknowledgements are 0.1 to 0.3 % here; a wire
    with an MTU of 1500 bytes would add 4.6 %.
    """
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            num_bytes, num_packets = (int(value) for value in counters.split()[8:10])  # after eight columns of receipts
            return num_bytes - num_packets * _HEADER_BYTES[interface]
    raise LookupError(f"this network namespace has no interface {interface!r}")


def _make(made: ExitStack, switch: str, names: list[str]) -> None:
    for name in (switch, *names):
        _ip("netns", "add", name)
        made.callback(_ip, "netns", "delete", name)
    # `addrgenmode none`: no IPv6 address, hence no neighbour discovery on the link.
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "addrgenmode", "none", "up")
    for index, name in enumerate(names):
        port = f"port{index}"
        _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", LINK, "netns", name)
        _ip("-n", switch, "link", "set", port, "addrgenmode", "none", "master", "bridge", "up")
        _ip("-n", name, "link", "set", INSIDE, "up")
        address = f"10.77.0.{index + 1}"
        _ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
        _ip("-n", name, "link", "set", LINK, "addrgenmode", "none", "up")
        for setting, value in _PATIENT_TCP.items():
            _ip("netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}")
        for route in (["10.77.0.0/24", "dev", LINK], ["local", address, "dev", LINK, "table", "local"]):
            _ip("-n", name, "route", "change", *route, "proto", "kernel", "src", address, "rto_min", _PATIENCE)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _give_up(reason: str) -> NoReturn:
    give_up(f"cannot count bytes on a link: {reason}")
