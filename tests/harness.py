"""Starts gloo ranks for a test.

Ranks are forked from a server process in which torch, and what torch imports lazily, is already imported and no op ever
ran: eight ranks start in well under a second. They meet in a FileStore in a temporary folder. The first failing rank's
traceback is raised in the test; a rank that hangs is killed at the time limit and named.
"""

import multiprocessing
import os
import pickle
import shutil
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.lacking import skip_where

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's compiler believes the CPU's flags. To try them, each process that compiles starts others that import torch.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.preload"])


def compiler() -> pytest.MarkDecorator:
    """Mark a test in which inductor makes kernels for the CPU."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    is_missing = shutil.which(os.environ.get("CXX", "g++")) is None or not headers.exists()
    reason = "inductor needs a C++ compiler and Python's headers (apt-get install g++ python3-dev)"
    return skip_where(is_missing, reason)


class RankFailedError(AssertionError):
    """A rank raised, died or hung; the message holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120.0,
    device: str = "cpu",
    staged: bool = False,
    backend: str | None = None,
) -> list[Any]:
    """Run `function(rank, *args)` on `world_size` ranks; return the results in rank order.

    `function` is a module-level function; arguments and results are pickled (CPU tensors by value). Ranks talk through
    gloo, or through NCCL with `device="cuda"` (rank r on GPU r); `staged`: through gloo there too, on the GPUs that there are.
    `backend`: `tests.fake_nccl.NAME` in their place. `timeout_seconds` is the default group's timeout too.
    """
    with forked_ranks(function, world_size, args, timeout_seconds, device, staged, backend) as (processes, connections):
        return _collect(connections, processes, timeout_seconds)


@contextmanager
def forked_ranks(
    function: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    timeout_seconds: float = 120.0,
    device: str = "cpu",
    staged: bool = False,
    backend: str | None = None,
) -> Iterator[tuple[list[ForkServerProcess], list[Connection]]]:
    """Ranks as `run_ranks` starts them, and where each sends its result; killed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="triaxis-test-") as folder:
        connections: list[Connection] = []
        processes: list[ForkServerProcess] = []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            payload = pickle.dumps((function, args))
            process = _CONTEXT.Process(
                target=_rank_main,
                args=(rank, world_size, folder, timeout_seconds, device, staged, backend, payload, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        try:
            yield processes, connections
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(connections: list[Connection], processes: list[ForkServerProcess], timeout_seconds: float) -> list[Any]:
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    open_ranks = {connection: rank for rank, connection in enumerate(connections)}
    while open_ranks:
        ready = wait(list(open_ranks), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {sorted(open_ranks.values())} did not finish in {timeout_seconds} seconds")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = open_ranks.pop(connection)
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                raise RankFailedError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if not succeeded:
                raise RankFailedError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(connections))]


def _rank_main(
    rank: int,
    world_size: int,
    folder: str,
    timeout_seconds: float,
    device: str,
    staged: bool,
    backend: str | None,
    payload: bytes,
    connection: Connection,
) -> None:
    import torch
    import torch.distributed as dist

    from tests import fake_nccl

    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(payload)
        if device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count() if staged else rank)
        if world_size > 1:
            store = dist.FileStore(str(Path(folder) / "store"), world_size)
            if backend is None:
                backend = "nccl" if device == "cuda" and not staged else "gloo"
            elif backend == fake_nccl.NAME:
                fake_nccl.install()
            timeout = timedelta(seconds=timeout_seconds)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        message = pickle.dumps((True, function(rank, *args)))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(message)
    connection.close()
    # A rank that left now would break a slower one that is still connecting: the test kills all ranks when it has heard
    # them (or its own end ends them), and gloo's threads never hold it up.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
