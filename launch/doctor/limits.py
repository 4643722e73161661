"""Check two node limits that NCCL can exceed, locked memory and the size of /dev/shm.

RLIMIT_MEMLOCK   InfiniBand pins every buffer that it sends from or receives into, and the kernel counts them against this
                 limit. A login shell, SLURM's daemon and a container may each set another value.
/dev/shm         ranks on one node that cannot reach each other's GPU memory exchange data through files there, megabytes per
                 peer and channel. Docker and Kubernetes give 64 MB by default.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from triaxis.launch.doctor.records import Examination, Finding, Level, LimitFacts, hosts_of
from triaxis.launch.start.process.named_causes import LOCKED_MEMORY_ADVICE, SHARED_MEMORY_ADVICE

SMALL_SHARED_BYTES = 64 * 2**20
"""Docker's default (`--shm-size`)."""

_IPC_LOCK = 14
"""Number of CAP_IPC_LOCK (capabilities(7)), which allows a process to lock any amount of memory."""


def read_limits(
    shared: Path = Path("/dev/shm"),
    status: Path = Path("/proc/self/status"),
    infiniband: Path = Path("/sys/class/infiniband"),
) -> LimitFacts:
    """Read this process's limit on locked memory, and the size of /dev/shm. CAP_IPC_LOCK removes the limit.

    Args:
        shared: folder for shared memory, normally /dev/shm.
        status: the kernel's status file for this process.
        infiniband: folder with one entry per adapter.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_unlimited = soft == resource.RLIM_INFINITY or _may_lock(status)
    space = os.statvfs(shared) if shared.is_dir() else None
    return LimitFacts(
        locked_bytes=None if is_unlimited else soft,
        shared_bytes=0 if space is None else space.f_blocks * space.f_frsize,
        has_infiniband=infiniband.is_dir() and any(infiniband.iterdir()),
    )


def _may_lock(status: Path) -> bool:
    lines = status.read_text().splitlines() if status.exists() else []
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _IPC_LOCK & 1)


def judge_limits(seen: Examination) -> Iterator[Finding]:
    """Compare each node's limits with those at which NCCL is known to fail.

    A problem is only a warning, because NCCL has just worked within these limits.

    Several ranks on a node need a /dev/shm above `SMALL_SHARED_BYTES`. InfiniBand needs unlimited locked memory.
    """
    facts = [(one, one.limits) for one in seen.facts if one.limits is not None]
    if not facts:
        return
    uses_nccl = seen.needs.backend == "nccl"
    neighbours = {one.node for one, _ in facts if sum(other.node == one.node for other in seen.facts) > 1}
    small = [
        (one, limits)
        for one, limits in facts
        if uses_nccl and one.node in neighbours and limits.shared_bytes <= SMALL_SHARED_BYTES
    ]
    limited = [
        (one, limits.locked_bytes)
        for one, limits in facts
        if uses_nccl and limits.has_infiniband and limits.locked_bytes is not None
    ]
    if small:
        size = min(limits.shared_bytes for _, limits in small)
        text = f"/dev/shm has {_in_mib(size)}, which NCCL may fill: ranks of one node talk through it"
        yield Finding(Level.WARN, "limits", text, hosts_of(one for one, _ in small), SHARED_MEMORY_ADVICE)
    if limited:
        size = min(locked for _, locked in limited)
        text = f"a rank may lock {_in_mib(size)} (RLIMIT_MEMLOCK), and InfiniBand locks every buffer"
        yield Finding(Level.WARN, "limits", text, hosts_of(one for one, _ in limited), LOCKED_MEMORY_ADVICE)
    locked = [limits.locked_bytes for _, limits in facts if limits.locked_bytes is not None]
    least = min(limits.shared_bytes for _, limits in facts)
    said = f"{_in_mib(min(locked))} of memory can be locked" if locked else "memory can be locked without limit"
    yield Finding(Level.OK, "limits", f"{said}; /dev/shm has {_in_mib(least)} or more")


def _in_mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB" if num_bytes < 2**20 else f"{num_bytes / 2**20:,.0f} MiB"
