"""The machine's ceilings: products of two square matrices of random numbers, soaked until clocks have settled.

Random, because products of zeros draw less power and run faster than anything that trains.
"""

import statistics
import time
from collections.abc import Callable

import torch

from triaxis.engine.kernels.fp8.products import scaled_product
from triaxis.engine.kernels.fp8.recipes import E4M3, quantise

BLOCK = 10
"""Products between two readings of the clock."""
BLOCKS = 15


def matmul_ceiling(size: int, dtype: torch.dtype, device: torch.device, soak_seconds: float) -> float:
    """Measure TFLOP/s of size^3 products: the median of `BLOCKS` blocks, after products for `soak_seconds`."""
    a, b = (one.to(dtype) for one in _operands(size, device))
    out = torch.empty_like(a)
    return _tflops(size, device, soak_seconds, lambda: torch.mm(a, b, out=out))


def fp8_ceiling(size: int, dtype: torch.dtype, device: torch.device, soak_seconds: float) -> float:
    """Measure the same for torch's scaled GEMM: operands in e4m3 with one scale each, results in `dtype`."""
    a, b = (quantise(one, E4M3, None, has_powers=False) for one in _operands(size, device))
    return _tflops(size, device, soak_seconds, lambda: scaled_product(a, b, None, dtype, is_fast=True))


def _operands(size: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    return [torch.randn(size, size, device=device, generator=generator) for _ in range(2)]


def _tflops(size: int, device: torch.device, soak_seconds: float, multiply: Callable[[], torch.Tensor]) -> float:
    def block() -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(BLOCK):
            multiply()
        synchronize(device)
        return time.perf_counter() - started

    soaked = 0.0
    while soaked < soak_seconds:
        soaked += block()
    seconds = statistics.median(block() for _ in range(BLOCKS))
    return BLOCK * 2 * size**3 / seconds / 1e12


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
