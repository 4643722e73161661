"""Draws initial weights that depend only on (seed, name), so they are equal in every layout.

The row-major logical tensor is divided into blocks of fixed size. A rank draws only the blocks that overlap its box (its part of
the tensor). Each block is drawn in fp32 on the CPU, with a generator seeded by hash(seed, name, block), then cast.
"""

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from triaxis.engine.layout.shard_spec import ParamRecord, box_runs
from triaxis.engine.numerics.precision import INIT_DTYPE
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

BLOCK_NUMEL = 1 << 16
"""Elements per generator. Changing it changes every model's initial weights."""


def initialize(parameters: Iterable[ShardedParameter], seed: int) -> None:
    """Fill parameters with their initial values; padding rows are zero.

    Each parameter must have its memory already (`ShardedParameter.bind`). The drawing runs on `torch.get_num_threads()` threads.
    """
    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="initial-weights") as threads:
        for _ in threads.map(lambda parameter: _fill(parameter, seed), parameters):
            pass  # reading a result raises its thread's exception


@torch.no_grad()
def _fill(parameter: ShardedParameter, seed: int) -> None:
    flat = parameter.value.view(-1)
    flat.zero_()
    flat[: parameter.record.box_numel] = initial_box(parameter.record, seed).to(flat.device, flat.dtype)


def initial_box(record: ParamRecord, seed: int) -> torch.Tensor:
    """Draw initial values for this rank's part of a parameter: row-major, flat, in fp32 on the CPU."""
    values = torch.empty(record.box_numel, dtype=INIT_DTYPE)
    init = record.spec.init
    if init.kind != "normal":
        return values.fill_(1.0 if init.kind == "ones" else 0.0)
    at = 0
    block_index, block = -1, values
    # The box covers runs of consecutive elements in the logical tensor. A run may span blocks, and a block may serve many runs.
    for start, stop in box_runs(record.spec.shape, record.box):
        while start < stop:
            if start // BLOCK_NUMEL != block_index:
                block_index = start // BLOCK_NUMEL
                block = _draw_block(record.name, block_index, record.spec.numel, seed)
            first = start - block_index * BLOCK_NUMEL
            count = min(stop - start, block.numel() - first)
            values[at : at + count] = block[first : first + count]
            at += count
            start += count
    return values.mul_(init.std)


def _draw_block(name: str, index: int, numel: int, seed: int) -> torch.Tensor:
    """Draw block `index` of standard normals: up to `BLOCK_NUMEL` elements in the flat logical tensor."""
    digest = hashlib.blake2b(f"{seed}/{name}/{index}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    count = min(BLOCK_NUMEL, numel - index * BLOCK_NUMEL)
    return torch.randn(count, generator=generator, dtype=INIT_DTYPE)
