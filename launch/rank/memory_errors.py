"""Recognise the out-of-memory errors of every library that allocates, and name the memory that ran out.

Each allocator or library, and the errors that it raises:

    torch's GPU allocator          torch.OutOfMemoryError
    torch, pinned memory           CUDA error: out of memory
    CUDA's driver API, Triton      CUDA driver error: out of memory; Triton Error [CUDA]: out of memory
    cuBLAS, cuSOLVER, cuDNN        CUBLAS_STATUS_ALLOC_FAILED and the like
    NCCL                           DistBackendError that ends with NCCL's failed line
    torch, host memory             DefaultCPUAllocator: can't allocate memory
    Python                         MemoryError; OSError ENOMEM from mmap and fork

The texts come from the binaries of NCCL 2.29.7, cuDNN 9.20, cuBLAS 13 and torch 2.13.
"""

import errno
import re
from enum import StrEnum

import torch


class MemoryPlace(StrEnum):
    """Kinds of memory, as a message words them."""

    GPU = "GPU memory"
    PINNED = "pinned host memory"
    HOST = "host memory"


_WORDS: tuple[tuple[str, MemoryPlace], ...] = (
    (r"CUDA out of memory", MemoryPlace.GPU),
    (r"CUDA error: out of memory", MemoryPlace.PINNED),
    (r"CUDA driver error: out of memory", MemoryPlace.GPU),
    (r"Triton Error \[CUDA\]: out of memory", MemoryPlace.GPU),
    (r"CU(?:BLAS|SOLVER|DNN)_STATUS_ALLOC_FAILED", MemoryPlace.GPU),
    (r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", MemoryPlace.GPU),
    (r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", MemoryPlace.HOST),
    (r"Failed to CUDA host alloc", MemoryPlace.PINNED),
    (r"Failed to CUDA (?:calloc|malloc)", MemoryPlace.GPU),
    (r"Cuda failure (?:\d+ )?'out of memory'", MemoryPlace.GPU),
    (r"Failed to malloc \d+ bytes", MemoryPlace.HOST),
    (
        r"(?:shared memory segment|[Ff]ailed to extend) /dev/shm/nccl\S* .*(?:No space left|Cannot allocate)",
        MemoryPlace.HOST,
    ),
    (r"DefaultCPUAllocator", MemoryPlace.HOST),
)
"""Patterns for a RuntimeError's message, and the memory that was requested. NCCL's shared memory segments are host memory."""


def exhausted(error: BaseException) -> MemoryPlace | None:
    """Return the memory that ran out; None if the error has another cause."""
    if isinstance(error, torch.OutOfMemoryError):
        return MemoryPlace.GPU
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return MemoryPlace.HOST
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    return next((place for words, place in _WORDS if re.search(words, text)), None)
