"""Copies one rank's state to host memory, from where a thread writes it to disk.

    training      | step | copy | step | step | step ...            training waits only for the copy
    this thread            `--- widen, write, hash, fsync ---> result, which the next step's flags report

The copy keeps the state's stored form (`engine/optimizer/state.py`), which may be narrow. The thread widens one piece at a time to
the accumulation dtype, which files always hold.

The thread issues no collective and touches no training tensor. A failed write is retried a few times, and each failure is reported.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from triaxis.engine.checkpoint.format.manifest import Kind
from triaxis.engine.checkpoint.format.store import Shard, write_file
from triaxis.engine.checkpoint.shards import saved_buckets, shards
from triaxis.engine.device.host_copy import FromCuda, ToHost
from triaxis.engine.device.pinned_memory import PageLock, PinnedBuffer, Purpose, page_lock_of
from triaxis.engine.optimizer.distributed import DistributedOptimizer
from triaxis.engine.optimizer.state import StoredState
from triaxis.engine.storage.files import write_atomically

PURPOSE = Purpose(
    "a checkpoint's copy of the state",
    "set checkpoint.async=false: no copy is kept then, and training waits until a checkpoint is on the disk",
)

RETRY_PAUSES_SECONDS = (1.0, 4.0)
"""Pauses before the second and third attempt to write: a full disk or a failing file system may recover."""


class FromCpu:
    """Copier for state that is already in CPU memory. `post` copies at once, so `finish` has nothing to wait for."""

    def room(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def post(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for destination, source in copies:
            destination.copy_(source)

    def finish(self, mark: None) -> None:
        pass


class RankWriter:
    """The writer of this rank's checkpoint files, one checkpoint at a time.

    Args:
        optimizer: owner of the saved state.
        rank: rank number, part of the file's name.
        in_background: whether to write from a copy in host memory; if False, training must wait while the live state is written.
        on_retry: function (error), called in the thread at each retry.
        page_lock: page lock for the copy's host memory; None: the device's default.

    Raises:
        OutOfMemoryError: there is no host memory for the copy.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        rank: int,
        in_background: bool,
        on_retry: Callable[[OSError], None],
        page_lock: PageLock | None = None,
    ) -> None:
        self._buckets = saved_buckets(optimizer)
        self._kinds = optimizer.state_kinds
        self._name = f"rank_{rank:05d}"
        self._on_retry = on_retry
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        device = optimizer.buffers.device
        self._to_host: ToHost = FromCuda() if device.type == "cuda" else FromCpu()
        live = [{kind: owned.state.stored(kind) for kind in owned.state.kinds} for owned in self._buckets]
        self._sources: Sequence[dict[Kind, StoredState]] = live
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._host_copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if in_background:
            tensors = [tensor for by_kind in live for stored in by_kind.values() for tensor in stored.tensors]
            # Never closed, because this object's `close` is called after errors too.
            memory = PinnedBuffer(
                [(tensor.numel(), tensor.dtype) for tensor in tensors], page_lock or page_lock_of(device), PURPOSE
            )
            on_host = {id(tensor) for tensor in optimizer.resident.host_tensors}
            for copy in zip(memory.vectors, tensors, strict=True):
                (self._host_copies if id(copy[1]) in on_host else self._copies).append(copy)
            vectors = iter(memory.vectors)
            self._sources = [
                {kind: stored.over([next(vectors) for _ in stored.tensors]) for kind, stored in by_kind.items()}
                for by_kind in live
            ]

    def save(self, folder: Path) -> Future[None]:
        """Copy the state to host memory, hand the copy to the writing thread, and return.

        The thread writes `folder`/rank_<n>.safetensors, and rank_<n>.json, its manifest entry. If `in_background` is False, the
        thread reads the live state, so the caller must wait for the future.

        Returns:
            A future that is done when the files are written; it raises the last attempt's OSError if all attempts fail.
        """
        # State in host memory is whole once these copies are done, since they are posted after the update's.
        self._to_host.finish(self._to_host.post(self._copies))
        for destination, source in self._host_copies:
            destination.copy_(source)
        return self._thread.submit(self._write, folder)

    def close(self) -> None:
        """Stop the thread after its running write."""
        self._thread.shutdown(wait=True)

    def _write(self, folder: Path) -> None:
        for pause_seconds in (*RETRY_PAUSES_SECONDS, None):
            try:
                self._write_once(folder)
                return
            except OSError as error:
                # The partial file is useless, and takes room on a full disk.
                (folder / f"{self._name}.safetensors").unlink(missing_ok=True)
                if pause_seconds is None:
                    raise
                self._on_retry(error)
                time.sleep(pause_seconds)

    def _write_once(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = write_file(folder / f"{self._name}.safetensors", list(self._shards()))
        # Input for the manifest: rank 0 reads this file and removes it.
        write_atomically(folder / f"{self._name}.json", [file.model_dump_json().encode()])

    def _shards(self) -> Iterator[Shard[StoredState]]:
        for kind in self._kinds:
            for owned, by_kind in zip(self._buckets, self._sources, strict=True):
                if kind in by_kind:
                    yield from shards(owned, by_kind[kind], kind)
