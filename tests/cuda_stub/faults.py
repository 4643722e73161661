"""Mistakes with NCCL, made by two ranks on purpose; each ends the process, or torch's watchdog ends it."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def _order(rank: int, x: torch.Tensor) -> None:
    gathered = torch.empty(2 * x.numel(), device=x.device)
    calls = [lambda: dist.all_reduce(x), lambda: dist.all_gather_into_tensor(gathered, x)]
    for call in calls if rank == 0 else reversed(calls):
        call()


def _size(rank: int, x: torch.Tensor) -> None:
    dist.all_reduce(x[: 4 + rank])


def _dtype(rank: int, x: torch.Tensor) -> None:
    dist.all_reduce(x if rank == 0 else x.bfloat16())


def _message(rank: int, x: torch.Tensor) -> None:
    """Send what nobody receives, over a connection that a first message has opened."""
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    if rank == 0:
        dist.send(x, 1)


def _group(rank: int, x: torch.Tensor) -> None:
    """Begin a group of calls, and never end it."""
    if rank == 0:
        dist.group.WORLD._start_coalescing(x.device)  # type: ignore[union-attr]
    dist.all_reduce(x)


WATCHDOG_SECONDS = 5

FAULTS = {"order": _order, "size": _size, "dtype": _dtype, "message": _message, "group": _group}


def make(rank: int, name: str, folder: Path) -> float:
    """Make a mistake; what is said of it goes to a file of the rank."""
    os.dup2(os.open(folder / f"rank{rank}", os.O_CREAT | os.O_WRONLY), 2)
    # The watchdog has to speak before the harness ends the ranks.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=WATCHDOG_SECONDS))
    x = torch.ones(8, device="cuda")
    FAULTS[name](rank, x)
    return float(x.sum())
