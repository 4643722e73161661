"""A number that identifies weights and moments, whatever the layout.

    fingerprint(kind) = sum over its tensors, rows r and columns c of (word[r, c] + golden) R(r) C(c)   mod 2^64

`word` is the element's raw bits as a signed integer (8-byte elements with their upper half folded into the lower one, since
round numbers have only an upper half). A column is an index of the last dim, a row the row-major index of all others; R and C are
pseudo-random odd numbers, mix64(key(kind, name) + (index + 1) golden) | 1. This is multilinear hashing modulo a power of two
(Lemire, Kaser, "Strongly universal string hashing is fast", 2014), with coefficients that factorise because tensors are cut
into boxes.

A sum of integers depends neither on order nor on layout. Factors are odd, so a change of one element changes the sum for certain;
swapped elements, rows or tensors change it but for one case in billions. Each element counts once, by the data-parallel owner of
the first replica; golden is added so that zeros count too.

Hashing takes as long as a save or a load on a fast disk, so it is kept to one product and one addition per element.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from triaxis.engine.checkpoint.format.boxes import flat_boxes
from triaxis.engine.checkpoint.format.manifest import Kind
from triaxis.engine.layout.shard_spec import Box
from triaxis.engine.numerics.hashing import GOLDEN, SAME_SIZE_INTEGERS, key64, mix_words_, shift_right, unsigned

_CPU_CHUNK_NUMEL = 2**15
"""Elements per multiplication on a CPU, whose 64-bit words fit a core's cache."""
_DEVICE_CHUNK_NUMEL = 2**24
"""Elements per multiplication on an accelerator, enough to keep it busy."""


def range_fingerprint(values: torch.Tensor, name: str, kind: Kind, shape: tuple[int, ...], box: Box, start: int) -> int:
    """Return the part of the sum from one flat range, in [0, 2^64).

    Args:
        values: 1-D, any float dtype: elements [start, start + numel) of the row-major `box`.
        name, kind: name and kind of the tensor.
        shape: its logical global shape.
        box: the part of it that contains the range.
        start: start of the range in the box.
    """
    chunk_numel = _CPU_CHUNK_NUMEL if values.device.type == "cpu" else _DEVICE_CHUNK_NUMEL
    parts = [part for part, _ in flat_boxes(box, start, start + len(values))]
    return _weighted_sum(values, f"{kind}:{name}", shape, parts, chunk_numel)


def combine(parts: Iterable[int]) -> int:
    """Return the fingerprint of disjoint parts together."""
    return sum(parts) % (1 << 64)


def to_text(fingerprint: int) -> str:
    return f"{fingerprint:016x}"


def describe(fingerprints: Mapping[Kind, str]) -> str:
    """Return a text for a log line: `master 0123456789abcdef, exp_avg ..`."""
    return ", ".join(f"{kind} {value}" for kind, value in fingerprints.items())


def _weighted_sum(
    values: torch.Tensor, key: str, shape: tuple[int, ...], parts: Sequence[Box], chunk_numel: int
) -> int:
    """Return the sum over the boxes that `values` consist of, in order, on their device; in [0, 2^64)."""
    bits = values.detach().view(SAME_SIZE_INTEGERS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    words = torch.empty(min(chunk_numel, len(bits)), dtype=torch.int64, device=bits.device)
    at = 0
    for part in parts:
        rows = _coefficients(f"{key}:row", _row_indices(shape[:-1], part[:-1], bits.device))
        columns = _coefficients(f"{key}:column", torch.arange(*(part[-1:] or ((0, 1),))[0], device=bits.device))
        numel = len(rows) * len(columns)
        block = bits[at : at + numel].view(len(rows), len(columns))
        # Whole rows where some fit into a chunk, else parts of one row.
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
    """Write word[r, c] C(c) of [rows, columns] raw bits to `out` and return it."""
    out.copy_(bits)
    if bits.element_size() == 8:
        out ^= shift_right(bits, 32)
    out *= column
    return out


def _coefficients(key: str, indices: torch.Tensor) -> torch.Tensor:
    """Return odd pseudo-random int64 numbers, one per index."""
    return mix_words_((indices + 1).mul_(GOLDEN).add_(key64(key))).bitwise_or_(1)


def _row_indices(shape: tuple[int, ...], box: Box, device: torch.device) -> torch.Tensor:
    """Return the row-major indices of a box in a tensor, in the box's order; int64 [numel]."""
    indices = torch.zeros(1, dtype=torch.int64, device=device)
    for size, (low, high) in zip(shape, box, strict=True):
        indices = (indices.view(-1, 1) * size + torch.arange(low, high, device=device)).view(-1)
    return indices
