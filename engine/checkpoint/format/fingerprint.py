"""Computes a number that identifies weights and moments, whatever the layout.

    fingerprint(kind) = sum over the kind's tensors, rows r and columns c of (word[r, c] + golden) R(r) C(c)   mod 2^64

`word` is an element's raw bits as a signed integer. For 8-byte elements, the upper half is folded into the lower half. A column is
an index along the last dim. A row is the row-major index over all other dims. R and C are pseudo-random odd numbers:
mix64(key(kind, name) + (index + 1) golden) | 1, with golden = GOLDEN. This is multilinear hashing modulo a power of two (Lemire,
Kaser, "Strongly universal string hashing is fast", 2014). A box of a tensor needs only one coefficient per row and per column.

The sum depends neither on order nor on layout. Changing one element always changes the sum. Swapping elements, rows or tensors
changes it too, except in one case in billions. Each element counts once, on the data-parallel owner in the first replica. Adding
golden makes zeros count too.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from triaxis.engine.checkpoint.format.boxes import flat_boxes
from triaxis.engine.checkpoint.format.manifest import Kind
from triaxis.engine.layout.shard_spec import Box
from triaxis.engine.numerics.hashing import GOLDEN, SAME_SIZE_INTEGERS, key64, mix_words_, shift_right, unsigned

_CPU_CHUNK_NUMEL = 2**15
"""Elements per multiplication on a CPU: this many 64-bit words fit into a core's cache."""
_DEVICE_CHUNK_NUMEL = 2**24
"""Elements per multiplication on an accelerator: enough to keep it busy."""


def range_fingerprint(values: torch.Tensor, name: str, kind: Kind, shape: tuple[int, ...], box: Box, start: int) -> int:
    """Compute what one flat range adds to the fingerprint, in [0, 2^64).

    Args:
        values: elements [start, start + numel) of the row-major `box`; 1-D, any float dtype.
        name, kind: name and kind of the tensor.
        shape: the tensor's logical global shape.
        box: part of the tensor that contains the range.
        start: index of the range's first element in the row-major `box`.
    """
    chunk_numel = _CPU_CHUNK_NUMEL if values.device.type == "cpu" else _DEVICE_CHUNK_NUMEL
    parts = [part for part, _ in flat_boxes(box, start, start + len(values))]
    return _weighted_sum(values, f"{kind}:{name}", shape, parts, chunk_numel)


def combine(parts: Iterable[int]) -> int:
    """Add up the fingerprints of disjoint parts, modulo 2^64."""
    return sum(parts) % (1 << 64)


def to_text(fingerprint: int) -> str:
    return f"{fingerprint:016x}"


def describe(fingerprints: Mapping[Kind, str]) -> str:
    """Format fingerprints for a log line, as `master 0123456789abcdef, exp_avg ..`."""
    return ", ".join(f"{kind} {value}" for kind, value in fingerprints.items())


def _weighted_sum(
    values: torch.Tensor, key: str, shape: tuple[int, ...], parts: Sequence[Box], chunk_numel: int
) -> int:
    """Compute the fingerprint sum, in [0, 2^64), of `values`, the elements of the boxes `parts` one after another."""
    bits = values.detach().view(SAME_SIZE_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    words = torch.empty(min(chunk_numel, len(bits)), dtype=torch.int64, device=bits.device)
    at = 0
    for part in parts:
        rows = _coefficients(f"{key}:row", _row_indices(shape[:-1], part[:-1], bits.device))
        columns = _coefficients(f"{key}:column", torch.arange(*(part[-1:] or ((0, 1),))[0], device=bits.device))
        numel = len(rows) * len(columns)
        block = bits[at : at + numel].view(len(rows), len(columns))
        # Whole rows if at least one fits into a chunk, else parts of one row.
        width = min(len(columns), chunk_numel)
        height = min(len(rows), chunk_numel // width)
        for strip, column in zip(block.split(width, dim=1), columns.split(width), strict=True):
            products = words[: height * len(column)].view(height, len(column))
            sums = [_products(chunk, column, products[: len(chunk)]).sum(dim=1) for chunk in strip.split(height)]
            total += (torch.cat(sums) * rows).sum()
        total += GOLDEN * rows.sum() * columns.sum()
        at += numel
    return unsigned(int(total))


def _products(bits: torch.Tensor, column: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write each word times its column's coefficient to `out` [rows, columns], and return `out`."""
    out.copy_(bits)
    if bits.element_size() == 8:
        out ^= shift_right(bits, 32)
    out *= column
    return out


def _coefficients(key: str, indices: torch.Tensor) -> torch.Tensor:
    """Return odd pseudo-random int64 numbers, one per index."""
    return mix_words_((indices + 1).mul_(GOLDEN).add_(key64(key))).bitwise_or_(1)


def _row_indices(shape: tuple[int, ...], box: Box, device: torch.device) -> torch.Tensor:
    """Return the row-major index in the whole tensor of each element in a box, int64 [numel]."""
    indices = torch.zeros(1, dtype=torch.int64, device=device)
    for size, (low, high) in zip(shape, box, strict=True):
        indices = (indices.view(-1, 1) * size + torch.arange(low, high, device=device)).view(-1)
    return indices
