"""Read this node's host memory, and how often the kernel has ended processes because memory ran out."""

from pathlib import Path

import psutil

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""File that holds the container's memory limit in bytes, or `max` if there is no limit."""

VMSTAT = Path("/proc/vmstat")
"""File with the kernel's counters, one `name number` per line."""


def host_memory_bytes(limit: Path = CGROUP_LIMIT) -> int:
    """Return this machine's memory in bytes, or the container's limit if that is less.

    Args:
        limit: file with the container's limit in bytes.
    """
    total = int(psutil.virtual_memory().total)
    text = limit.read_text().strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))


def kernel_kills(counters: Path = VMSTAT) -> int:
    """Count the processes that the kernel has ended since boot because memory ran out; 0 if it does not count them.

    Args:
        counters: file with the kernel's counters.
    """
    lines = counters.read_text().splitlines() if counters.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
