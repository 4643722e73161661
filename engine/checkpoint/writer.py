"""One rank's writer: a copy of the state in host memory, and a thread that brings it to the disk.

    training      | step | copy | step | step | step ...            the copy is all that training waits for
    this thread            `------- write, hash, fsync -------> result, asked for with the step's flags

The thread issues no collective and touches no tensor that training uses. A failed write is tried again a few times, each time
from the beginning, and every failure is told.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.direct import aligned_buffer
from engine.checkpoint.manifest import KINDS, DataFile, Kind
from engine.checkpoint.state import saved_buckets, shards
from engine.checkpoint.store import Shard, write_file
from engine.data.files import write_atomically
from engine.optimizer.distributed import DistributedOptimizer, OwnedBucket
from engine.transfers import FromCpu, FromCuda, ToHost

RETRY_PAUSES_SECONDS = (1.0, 4.0)
"""Pauses before the second and third attempt to write: a full disk or a file system that hiccups may recover."""


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank's thread came to."""

    file: DataFile
    seconds: float


class RankWriter:
    """Copies and writes this rank's part of checkpoints, one at a time.

    Args:
        optimizer: whose state is saved.
        rank: names the file.
        in_background: keep a copy in host memory to write from (bytes of the state again); else training must not go on
            until `result` is there, and the file is written from the live state.
        on_retry: called in the thread with the error of an attempt that is tried again.
        to_host: makes the copy; None: the device's way.
        thread: writes the copy; None: a new thread.
    """

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        rank: int,
        in_background: bool,
        on_retry: Callable[[OSError], None],
        *,
        to_host: ToHost | None = None,
        thread: Executor | None = None,
    ) -> None:
        self._buckets = saved_buckets(optimizer)
        self._name = f"rank_{rank:05d}"
        self._on_retry = on_retry
        self._thread = thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        is_cuda = optimizer.buffers.device.type == "cuda"
        self._to_host: ToHost = to_host or (FromCuda() if is_cuda else FromCpu())
        # The live state can be written from where it is only if it is kept in the form that is saved.
        must_copy = in_background or not all(owned.state.is_wide for owned in self._buckets)
        self._copies = [_host_copies(owned) for owned in self._buckets] if must_copy else None

    def save(self, folder: Path) -> Future[Written]:
        """Copy the state and start to write it as `folder`/rank_<n>.safetensors; returns when the copy is made."""
        if self._copies is None:
            sources: Sequence[dict[Kind, torch.Tensor]] = [owned.state.read_all() for owned in self._buckets]
        else:
            sources = self._copies
            pairs = zip(self._buckets, sources, strict=True)
            mark = self._to_host.post(
                (copies[kind], owned.state.read(kind)) for owned, copies in pairs for kind in KINDS
            )
            self._to_host.finish(mark)
        return self._thread.submit(self._write, folder, sources)

    def close(self) -> None:
        """Let go of the thread when what it writes is written."""
        self._thread.shutdown(wait=True)

    def _write(self, folder: Path, sources: Sequence[dict[Kind, torch.Tensor]]) -> Written:
        started = time.monotonic()
        for pause_seconds in (*RETRY_PAUSES_SECONDS, None):
            try:
                file = self._write_once(folder, sources)
                return Written(file, time.monotonic() - started)
            except OSError as error:
                # What is there of the file is of no use, and on a full disk it is in the way.
                (folder / f"{self._name}.safetensors").unlink(missing_ok=True)
                if pause_seconds is None:
                    raise
                self._on_retry(error)
                time.sleep(pause_seconds)
        raise AssertionError("the last attempt returns or raises")

    def _write_once(self, folder: Path, sources: Sequence[dict[Kind, torch.Tensor]]) -> DataFile:
        folder.mkdir(parents=True, exist_ok=True)
        file = write_file(folder / f"{self._name}.safetensors", list(self._shards(sources)))
        # What rank 0 needs to write the manifest; it is removed when the manifest is there.
        write_atomically(folder / f"{self._name}.json", [file.model_dump_json().encode()])
        return file

    def _shards(self, sources: Sequence[dict[Kind, torch.Tensor]]) -> Iterator[Shard]:
        for kind in KINDS:
            for owned, flats in zip(self._buckets, sources, strict=True):
                yield from shards(owned, flats[kind], kind)


def _host_copies(owned: OwnedBucket) -> dict[Kind, torch.Tensor]:
    """Host memory for a copy of the bucket's state, touched now, so that the first copy does not pay for its pages."""

    live, dtype = owned.parameters, owned.state.wide

    def host_copy() -> torch.Tensor:
        if live.device.type == "cuda":
            return torch.empty(live.shape, dtype=dtype, pin_memory=True).zero_()
        num_bytes = live.numel() * dtype.itemsize
        return aligned_buffer(num_bytes)[:num_bytes].view(dtype).zero_()

    return {kind: host_copy() for kind in KINDS}
