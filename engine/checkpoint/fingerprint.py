"""A number that says what the weights and moments are, whatever the layout.

    fingerprint(kind) = sum over all elements of mix64(mix64(key(name, kind) + (index + 1) golden) xor bits)   mod 2^64

`index` is the element's place in the row-major global tensor, `bits` its raw bits as a signed integer of its width. A sum of
integers does not depend on order or on who holds what, so every layout gives the same number, and one flipped bit anywhere
gives another. Each element counts once: by the data-parallel owner of the first replica. Two elements, or two tensors, that
swap contents give another number too: place and name are in the sum.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch

from engine.checkpoint.boxes import flat_boxes
from engine.checkpoint.manifest import Kind
from engine.mix64 import GOLDEN, key64, mix64_, unsigned
from engine.shard_spec import Box, box_runs

_CHUNK_NUMEL = 2**16
"""Elements that are mixed at a time: their 64-bit words stay in a CPU core's cache."""

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
    key = key64(f"{kind}:{name}")
    bits = values.detach().view(_BITS[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    at = 0
    for part, _ in flat_boxes(box, start, start + len(bits)):
        for index in _indices(shape, part, bits.device):
            z = mix64_((index + 1) * GOLDEN + key).view(-1)
            z ^= bits[at : at + len(z)]
            total += mix64_(z).sum()
            at += len(z)
    return unsigned(int(total))


def combine(parts: Iterable[int]) -> int:
    """The fingerprint of disjoint parts together."""
    return sum(parts) % (1 << 64)


def to_text(fingerprint: int) -> str:
    return f"{fingerprint:016x}"


def describe(fingerprints: Mapping[Kind, str]) -> str:
    """`master 0123456789abcdef, exp_avg ..`, for a log line."""
    return ", ".join(f"{kind} {value}" for kind, value in fingerprints.items())


def _indices(shape: tuple[int, ...], box: Box, device: torch.device) -> Iterator[torch.Tensor]:
    """Row-major global indices of the elements of `box`, in order, as int64 blocks [runs, run length] of bounded size."""
    runs = list(box_runs(shape, box))
    length = runs[0][1] - runs[0][0]
    if length >= _CHUNK_NUMEL:
        for first, stop in runs:
            for at in range(first, stop, _CHUNK_NUMEL):
                yield torch.arange(at, min(at + _CHUNK_NUMEL, stop), device=device).view(1, -1)
        return
    # All runs of a box are equally long: many short ones (a matrix cut by columns) are mixed together.
    starts = torch.tensor([first for first, _ in runs], device=device)
    inside = torch.arange(length, device=device)
    for some in starts.split(max(1, _CHUNK_NUMEL // length)):
        yield some.view(-1, 1) + inside
