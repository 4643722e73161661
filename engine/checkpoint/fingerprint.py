"""A number that says what the weights and moments are, whatever the layout.

    fingerprint(kind) = sum over all elements of fold64((key(name, kind) + (index + 1) golden) xor bits)   mod 2^64

`index` is the element's place in the row-major global tensor, `bits` its raw bits as a signed integer of its width. A sum of
integers does not depend on order or on who holds what, so every layout gives the same number, and one flipped bit anywhere
gives another. Each element counts once: by the data-parallel owner of the first replica. Two elements, or two tensors, that
swap contents give another number too: place and name are in the sum.

`fold64` is a bijection, so any change of one element changes the sum for certain; the counter, key + (index + 1) golden,
never repeats within a tensor. A stronger mix would find no more of what goes wrong on disks and in layouts, and the time
of a save on a fast disk is the time of this sum.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoint.boxes import flat_boxes
from engine.checkpoint.manifest import Kind
from engine.mix64 import GOLDEN, fold64_, fold64_array_, key64, unsigned, words
from engine.shard_spec import Box

_CPU_CHUNK_NUMEL = 2**14
"""Elements that are mixed at a time: their 64-bit words stay in a CPU core's cache."""
_DEVICE_CHUNK_NUMEL = 2**24
"""On an accelerator: enough to keep it busy."""

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def range_fingerprint(values: torch.Tensor, name: str, kind: Kind, shape: tuple[int, ...], box: Box, start: int) -> int:
    """The part of the sum that one flat range contributes, as a number in [0, 2^64).

    Args:
        values: 1-D, any float dtype: elements [start, start + numel) of the row-major `box`.
        name, kind: of the tensor.
        shape: its logical global shape.
        box: the part of it that the range is cut from.
        start: where the range begins in the box.
    """
    bits = values.detach().view(_BITS[values.element_size()])
    key = key64(f"{kind}:{name}")
    parts = [part for part, _ in flat_boxes(box, start, start + len(bits))]
    if bits.device.type == "cpu":
        return _sum_on_cpu(bits.numpy(), shape, parts, key)
    return _sum_on_device(bits, shape, parts, key, _DEVICE_CHUNK_NUMEL)


def combine(parts: Iterable[int]) -> int:
    """The fingerprint of disjoint parts together."""
    return sum(parts) % (1 << 64)


def to_text(fingerprint: int) -> str:
    return f"{fingerprint:016x}"


def describe(fingerprints: Mapping[Kind, str]) -> str:
    """`master 0123456789abcdef, exp_avg ..`, for a log line."""
    return ", ".join(f"{kind} {value}" for kind, value in fingerprints.items())


def _sum_on_cpu(bits: NDArray[np.signedinteger], shape: tuple[int, ...], parts: Iterable[Box], key: int) -> int:
    golden = words(GOLDEN)
    # key + (index + 1) golden, for indices that count from 0; a run adds golden times where it begins.
    from_zero = words(np.arange(1, _CPU_CHUNK_NUMEL + 1)) * golden + words(key)
    buffer, spare = np.empty_like(from_zero), np.empty_like(from_zero)
    total = at = 0
    for part in parts:
        for starts, length in _runs(shape, part, _CPU_CHUNK_NUMEL):
            numel = len(starts) * length
            z, other = buffer[:numel], spare[:numel]
            np.add((words(starts) * golden)[:, np.newaxis], from_zero[:length], out=z.reshape(len(starts), length))
            np.copyto(other.view(np.int64), bits[at : at + numel])
            np.bitwise_xor(z, other, out=z)
            fold64_array_(z, other)
            total += int(z.sum())
            at += numel
    return total % (1 << 64)


def _sum_on_device(bits: torch.Tensor, shape: tuple[int, ...], parts: Iterable[Box], key: int, chunk_numel: int) -> int:
    """The same in torch, on the device that holds `bits`."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    at = 0
    for part in parts:
        for starts, length in _runs(shape, part, chunk_numel):
            first = torch.from_numpy(starts).to(bits.device).view(-1, 1)
            z = (first + torch.arange(1, length + 1, device=bits.device)).view(-1).mul_(GOLDEN).add_(key)
            z ^= bits[at : at + len(z)]
            total += fold64_(z).sum()
            at += len(z)
    return unsigned(int(total))


def _runs(shape: tuple[int, ...], box: Box, chunk_numel: int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """The box in its order, as blocks of equally long runs of row-major global indices: (their starts, their length).

    A block has at most `chunk_numel` elements: a part of one long run, or many short ones (a matrix cut by columns).
    """
    starts, length = run_starts(shape, box)
    if length >= chunk_numel:
        for start in starts.tolist():
            for at in range(start, start + length, chunk_numel):
                yield np.array([at]), min(chunk_numel, start + length - at)
    else:
        num_runs = chunk_numel // length
        for first in range(0, len(starts), num_runs):
            yield starts[first : first + num_runs], length


def run_starts(shape: tuple[int, ...], box: Box) -> tuple[NDArray[np.int64], int]:
    """`shard_spec.box_runs` as an array: where the contiguous runs of a box begin, in order, and how long each is."""
    starts, length = np.zeros(1, dtype=np.int64), 1
    # The longest tail of dims that the box covers whole, plus the dim before it, is one run.
    dim = len(shape)
    while dim > 0 and box[dim - 1] == (0, shape[dim - 1]):
        dim -= 1
        length *= shape[dim]
    if dim == 0:
        return starts, length
    for size, (low, high) in zip(shape[: dim - 1], box[: dim - 1], strict=True):
        starts = (starts[:, np.newaxis] * size + np.arange(low, high)).reshape(-1)
    low, high = box[dim - 1]
    return (starts * shape[dim - 1] + low) * length, (high - low) * length
