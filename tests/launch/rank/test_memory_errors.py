"""Every library's words for memory that has run out, and errors that only sound like it."""

import errno

import pytest
import torch
import torch.distributed as dist

from triaxis.engine.errors import ConfigError
from triaxis.launch.rank.memory_errors import MemoryPlace, exhausted

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.29.7\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
)
SEGMENT = "Error while creating shared memory segment /dev/shm/nccl-1RaVYm (size 33030532), error: No space left on device (28)"


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"), MemoryPlace.GPU),
        (
            torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously"),
            MemoryPlace.PINNED,
        ),
        (RuntimeError("CUDA error: out of memory"), MemoryPlace.PINNED),
        (RuntimeError("CUDA driver error: out of memory"), MemoryPlace.GPU),
        (RuntimeError("Triton Error [CUDA]: out of memory"), MemoryPlace.GPU),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), MemoryPlace.GPU),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), MemoryPlace.GPU),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), MemoryPlace.GPU),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), MemoryPlace.HOST),
        (dist.DistBackendError(f"{NCCL}Failed to CUDA calloc async 608 bytes"), MemoryPlace.GPU),
        (dist.DistBackendError(f"{NCCL}Failed to CUDA malloc 4194304 bytes"), MemoryPlace.GPU),
        (dist.DistBackendError(f"{NCCL}Failed to CUDA host alloc 4194304 bytes"), MemoryPlace.PINNED),
        (dist.DistBackendError(f"{NCCL}Cuda failure 2 'out of memory'"), MemoryPlace.GPU),
        (dist.DistBackendError(f"{NCCL}Cuda failure 'out of memory'"), MemoryPlace.GPU),
        (dist.DistBackendError(f"{NCCL}Failed to malloc 4096 bytes"), MemoryPlace.HOST),
        (dist.DistBackendError(f"{NCCL}{SEGMENT}"), MemoryPlace.HOST),
        (
            dist.DistBackendError(f"{NCCL}Error: failed to extend /dev/shm/nccl-x to 9 bytes, error: No space left"),
            MemoryPlace.HOST,
        ),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
            MemoryPlace.HOST,
        ),
        (MemoryError(), MemoryPlace.HOST),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryPlace.HOST),
    ],
    ids=lambda value: str(value).splitlines()[-1][:60] if str(value) else "MemoryError",
)
def test_memory_that_has_run_out(error: BaseException, place: MemoryPlace) -> None:
    assert exhausted(error) is place


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        dist.DistBackendError(f"{NCCL}Cuda failure 700 'an illegal memory access was encountered'"),
        dist.DistBackendError(f"{NCCL}socketPollConnect: connect returned Connection refused"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("CUDA error: out of memory"),
        ConfigError(["CUDA out of memory"]),
    ],
    ids=lambda error: str(error).splitlines()[-1][:60],
)
def test_other_errors(error: BaseException) -> None:
    assert exhausted(error) is None


def test_what_torch_says_on_this_machine() -> None:
    with pytest.raises(RuntimeError) as told:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert exhausted(told.value) is MemoryPlace.HOST
