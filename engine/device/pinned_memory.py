"""Provides page-locked ("pinned") host memory in the requested size, rounded up to a page.

A GPU copies to and from page-locked memory asynchronously; with pageable memory the host waits for each copy. torch's pinned
allocator would round every request up to a power of two. Here memory is mapped first, and its pages are locked in place:

    PinnedBuffer   one mapping, cut into vectors, for a checkpoint's copy of the state
    PinnedPool     vectors that are reused by length and dtype, for offloaded activations and staged messages

On a CPU the memory stays pageable. The pool does not know which copies are running. So callers of `PinnedPool.give` return a vector
when it is free, or with the events after which it is free.

Pages stay locked until `close` or the end of the process. Garbage collection does not unlock them, because unlocking waits for the
device. After a failure, that wait might never end.
"""

import atexit
import mmap
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import psutil
import torch

from triaxis.engine.device.host_memory import host_memory_bytes
from triaxis.engine.errors import OutOfMemoryError

PAGE_BYTES = 4096
"""Bytes in the smallest page on today's processors; with larger pages only the rounding differs."""

HUGE_PAGE_BYTES = 2 * 2**20
"""Bytes in a huge page; on systems with another size, buffers are still aligned, but some pages stay small."""

VECTOR_ALIGNMENT = 64
"""Vector alignment in bytes: a cache line, and the widest vector register."""

VectorSize = tuple[int, torch.dtype]
"""Number of elements and dtype of a vector."""


class Purpose(NamedTuple):
    """Words for an error about missing memory.

    Attributes:
        name: use of the memory.
        instead: another remedy than more memory; completes "Give the ranks of this node more host memory, or".
    """

    name: str
    instead: str


class PageLock(Protocol):
    """A lock on pages of host memory, for one device's copies."""

    def lock(self, memory: torch.Tensor) -> None:
        """Lock the pages of `memory`, uint8 [n], page-aligned.

        Raises:
            OSError: the driver refuses; the message is the driver's.
        """
        ...

    def unlock(self, memory: torch.Tensor) -> None:
        """Wait for the device's copies, then unlock the pages of a `memory` given to `lock`."""
        ...


class Pageable:
    """The page lock for a CPU, which locks nothing."""

    def lock(self, memory: torch.Tensor) -> None:
        pass

    def unlock(self, memory: torch.Tensor) -> None:
        pass


class RuntimeCalls(Protocol):
    """CUDA runtime calls for a page lock. Code 0 is success."""

    def register(self, address: int, num_bytes: int) -> int: ...
    def unregister(self, address: int) -> int: ...
    def error_text(self, code: int) -> str: ...
    def synchronize(self) -> None: ...


class CudaRuntime:
    """torch's CUDA calls to lock and unlock pages (`RuntimeCalls`); `synchronize` waits only for `device`."""

    PORTABLE = 1
    """`cudaHostRegisterPortable`: memory is page-locked for every CUDA context in the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, self.PORTABLE))

    def unregister(self, address: int) -> int:
        return int(torch.cuda.cudart().cudaHostUnregister(address))

    def error_text(self, code: int) -> str:
        runtime = torch.cuda.cudart()
        return str(runtime.cudaGetErrorString(runtime.cudaError(code)))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class CudaPageLock:
    """The page lock for a GPU, by `cudaHostRegister`.

    Args:
        runtime: CUDA calls to use: a `CudaRuntime` for the GPU that copies; tests pass a stand-in.
    """

    def __init__(self, runtime: RuntimeCalls) -> None:
        self._runtime = runtime
        self._keepers: dict[int, partial[None]] = {}

    def lock(self, memory: torch.Tensor) -> None:
        """Lock the pages, and keep them mapped until `unlock` or the end of the process.

        If locked pages were unmapped, the device would still copy to the old pages.
        """
        address = memory.data_ptr()
        code = self._runtime.register(address, memory.nbytes)
        if code:
            raise OSError(f"cudaHostRegister: {self._runtime.error_text(code)} ({code})")
        self._keepers[address] = partial(_keep, memory)
        atexit.register(self._keepers[address])

    def unlock(self, memory: torch.Tensor) -> None:
        """Wait until the device has finished all copies, then unlock the pages."""
        address = memory.data_ptr()
        self._runtime.synchronize()
        code = self._runtime.unregister(address)
        assert not code, f"cudaHostUnregister: {self._runtime.error_text(code)} ({code})"
        atexit.unregister(self._keepers.pop(address))


def _keep(memory: torch.Tensor) -> None:
    """Do nothing. `atexit` holds this call, and so keeps `memory` alive."""


def page_lock_of(device: torch.device) -> PageLock:
    """Return a `CudaPageLock` if `device` is a GPU, else `Pageable`, which locks nothing."""
    return CudaPageLock(CudaRuntime(device)) if device.type == "cuda" else Pageable()


def aligned_buffer(num_bytes: int) -> torch.Tensor:
    """Map private host memory, uint8, in whole 4 KiB pages.

    The buffer has at least `num_bytes` bytes. It is aligned to a page, or to a huge page if it is at least that long. Huge pages
    allow disk requests of 4 MiB instead of 0.6 MiB.

    Raises:
        OSError: the system has no such memory.
    """
    length = -(-max(num_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
    alignment = HUGE_PAGE_BYTES if length >= HUGE_PAGE_BYTES else PAGE_BYTES
    memory = mmap.mmap(-1, length + alignment - PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if alignment == HUGE_PAGE_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    # After a fork the first write would give this process another page, while the device keeps the locked one.
    memory.madvise(mmap.MADV_DONTFORK)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    lead = -buffer.data_ptr() % alignment
    return buffer[lead : lead + length]


class PinnedBuffer:
    """One mapping of page-locked host memory, cut into vectors.

    Args:
        sizes: number of elements and dtype of each vector.
        page_lock: object that locks pages, from `page_lock_of` for the device that copies.
        purpose: words for the error if there is no memory.

    Attributes:
        vectors: 1-D tensors in the order of `sizes`, aligned to `VECTOR_ALIGNMENT` bytes, with undefined contents; their memory is
            already allocated.
        num_bytes: number of locked bytes.

    Raises:
        OutOfMemoryError: the memory cannot be mapped, or its pages cannot be locked.
    """

    def __init__(self, sizes: Sequence[VectorSize], page_lock: PageLock, purpose: Purpose) -> None:
        starts, end = [], 0
        for numel, dtype in sizes:
            starts.append(end)
            end += -(-numel * dtype.itemsize // VECTOR_ALIGNMENT) * VECTOR_ALIGNMENT
        try:
            memory = aligned_buffer(end)
        except OSError as error:
            raise OutOfMemoryError(_not_mapped(end, purpose, error)) from error
        self.num_bytes = memory.nbytes
        # Touch all pages so that they exist, and the first copy does not pay for it.
        memory[::PAGE_BYTES].zero_()
        try:
            page_lock.lock(memory)
        except OSError as error:
            raise OutOfMemoryError(_not_locked(self.num_bytes, purpose, error)) from error
        self._page_lock = page_lock
        self._memory = memory
        self._is_locked = True
        self.vectors = [
            memory[start : start + numel * dtype.itemsize].view(dtype)
            for start, (numel, dtype) in zip(starts, sizes, strict=True)
        ]

    def close(self) -> None:
        """Wait for the device and unlock the pages. The vectors stay usable, as pageable memory."""
        if self._is_locked:
            self._page_lock.unlock(self._memory)
            self._is_locked = False


class PinnedPool:
    """Page-locked vectors that are reused by length and dtype, because locking pages is slow.

    Args:
        page_lock: object that locks pages, from `page_lock_of` for the device that copies.
        purpose: words for the error if there is no memory.
    """

    def __init__(self, page_lock: PageLock, purpose: Purpose) -> None:
        self._page_lock = page_lock
        self._purpose = purpose
        self._guard = threading.Lock()
        self._buffers: list[PinnedBuffer] = []
        self._free: dict[VectorSize, list[tuple[torch.Tensor, Sequence[torch.cuda.Event]]]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a free vector of this length and dtype, else a new one. Its contents are undefined.

        Raises:
            OutOfMemoryError: there is no memory for a new vector.
        """
        with self._guard:
            free = self._free.get((numel, dtype), [])
            for place, (vector, events) in enumerate(free):
                if all(event.query() for event in events):
                    del free[place]
                    return vector
        buffer = PinnedBuffer([(numel, dtype)], self._page_lock, self._purpose)
        with self._guard:
            self._buffers.append(buffer)
        return buffer.vectors[0]

    def give(self, vector: torch.Tensor, events: Sequence[torch.cuda.Event] = ()) -> None:
        """Return a vector to the pool. It is free once all `events` are reached."""
        with self._guard:
            self._free.setdefault((vector.numel(), vector.dtype), []).append((vector, events))

    @property
    def vectors(self) -> list[torch.Tensor]:
        """All vectors of the pool, free or in use."""
        return [vector for buffer in self._buffers for vector in buffer.vectors]

    @property
    def num_bytes(self) -> int:
        """Total size of all vectors in bytes, free or in use."""
        return sum(vector.nbytes for vector in self.vectors)

    @property
    def num_free(self) -> int:
        """Number of vectors in the pool that were given back and not taken again."""
        return sum(len(vectors) for vectors in self._free.values())

    def close(self) -> None:
        """Wait for the device and unlock all vectors. None may be taken afterwards."""
        for buffer in self._buffers:
            buffer.close()
        self._free.clear()


def _not_mapped(num_bytes: int, purpose: Purpose, error: OSError) -> str:
    return (
        f"{_amount(num_bytes)} of host memory for {purpose.name} could not be mapped: {error}. The run cannot go on without it. "
        f"Give the ranks of this node more host memory, or {purpose.instead}."
    )


def _not_locked(num_bytes: int, purpose: Purpose, error: OSError) -> str:
    free = psutil.virtual_memory().available
    return (
        f"{_amount(num_bytes)} of host memory for {purpose.name} could not be page-locked: {error}. A GPU copies to other memory "
        "only while the host waits, so training would stop for each copy. CUDA can lock memory only up to what is free on the node "
        f"({free / 2**30:.1f} GiB) and what the job's container or cgroup may hold ({host_memory_bytes() / 2**30:.1f} GiB); "
        "ulimit -l does not count here. Give the job more memory (SLURM: --mem=0; docker: --memory; Kubernetes: "
        f"resources.limits.memory), free memory of the node, or {purpose.instead}."
    )


def _amount(num_bytes: int) -> str:
    return f"{num_bytes:,} bytes ({num_bytes / 2**30:.1f} GiB)"
