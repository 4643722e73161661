"""The machine's ceiling: the product of two square matrices of random numbers, soaked until clocks have settled.

Random, because products of zeros draw less power and run faster than anything that trains.
"""

import statistics
import time

import torch

BLOCK = 10
"""Products between two readings of the clock."""
BLOCKS = 15


def matmul_ceiling(size: int, dtype: torch.dtype, device: torch.device, soak_seconds: float) -> float:
    """Measure TFLOP/s of size^3 products: the median of `BLOCKS` blocks, after products for `soak_seconds`."""
    generator = torch.Generator(device).manual_seed(1)
    a, b = (torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def block() -> float:
        synchronize(device)
        started = time.perf_counter()
        for _ in range(BLOCK):
            torch.mm(a, b, out=out)
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
