"""Finds the tensors that differ between two checkpoints in any two layouts.

    manifests     each tensor's fingerprints add up to a number that is equal in any layout, so different sums show a difference
    the bytes     are read for the first tensor that differs, and for tensors with different dtypes

Tensors are read in flat ranges no larger than a piece, so memory does not grow with the model.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import numpy as np
import torch

from triaxis.engine.checkpoint.directory import Candidate
from triaxis.engine.checkpoint.format.manifest import PIECE_BYTES, DType, Kind, Manifest, Piece
from triaxis.engine.checkpoint.format.store import TORCH_DTYPES, Shard, load
from triaxis.engine.checkpoint.resume_rules import flat
from triaxis.engine.numerics.hashing import SAME_SIZE_INTEGERS

_WIDEST_BYTES = 8

Verdict = Literal["only in A", "only in B", "other shape", "other dtype", "other values"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's shape, the dtypes of its pieces, and the sum of the pieces' fingerprints modulo 2^64."""

    shape: tuple[int, ...]
    dtypes: frozenset[DType]
    fingerprint: int


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs, or may differ, between the checkpoints A and B.

    With the verdict `other dtype`, the values may be equal, and only comparing the bytes shows it. Tensors with pieces of several
    dtypes have this verdict too.

    Attributes:
        one, other: the tensor in A and in B; None: the tensor is missing there.
    """

    name: str
    kind: Kind
    verdict: Verdict
    one: Tensor | None
    other: Tensor | None


@dataclass(frozen=True, slots=True)
class ValueDifferences:
    """The place and size of one tensor's differences.

    Attributes:
        numel: number of elements compared.
        num_different: number of differing elements, compared by bits for equal dtypes, else by value.
        first: global index of the first differing element, and its values in A and B; None: no element differs.
        largest_absolute, largest_relative: largest |a - b| and largest |a - b| / max(|a|, |b|), where a and b are both finite.
    """

    numel: int
    num_different: int
    first: tuple[tuple[int, ...], float, float] | None
    largest_absolute: float
    largest_relative: float


def tensors_of(manifest: Manifest) -> dict[tuple[str, Kind], Tensor]:
    """Summarise a manifest's tensors by (name, kind), in the manifest's order."""
    pieces: dict[tuple[str, Kind], list[Piece]] = {}
    for file in manifest.files:
        for piece in file.pieces:
            pieces.setdefault((piece.name, piece.kind), []).append(piece)
    return {
        (name, kind): Tensor(
            info.shape,
            frozenset(piece.dtype for piece in mine),
            sum(int(piece.fingerprint, 16) for piece in mine) % (1 << 64),
        )
        for name, info in manifest.tensors.items()
        for kind in manifest.kinds_of(info)
        if (mine := pieces.get((name, kind)))
    }


def compared_kinds(one: Manifest, other: Manifest) -> tuple[Kind, ...]:
    """List the kinds of tensor that both checkpoints have.

    Weights are the only kind if the optimizer states have no kind in common.
    """
    return tuple(kind for kind in one.kinds if kind in other.kinds)


def differences(one: Manifest, other: Manifest) -> list[TensorDifference]:
    """List tensors that differ, or may differ, between two checkpoints' manifests. Weights come first, in `one`'s order."""
    ours, theirs = tensors_of(one), tensors_of(other)
    found = []
    for kind in compared_kinds(one, other):
        names = dict.fromkeys(name for name, its_kind in [*ours, *theirs] if its_kind == kind)
        for name in names:
            a, b = ours.get((name, kind)), theirs.get((name, kind))
            verdict = _verdict(a, b)
            if verdict is not None:
                found.append(TensorDifference(name, kind, verdict, a, b))
    return found


def compare_values(one: Candidate, other: Candidate, name: str, kind: Kind) -> ValueDifferences:
    """Compare the bytes of one tensor, which must have the same shape in both checkpoints.

    Raises:
        CheckpointError: a file is damaged.
    """
    shape = one.manifest.tensors[name].shape
    numel = math.prod(shape)
    readers = [_FlatReader(candidate, name, kind) for candidate in (one, other)]
    same_dtype = readers[0].dtype == readers[1].dtype
    step = PIECE_BYTES // _WIDEST_BYTES
    num_different, first = 0, None
    absolute = relative = 0.0
    for start in range(0, numel, step):
        a, b = (reader.read(start, min(start + step, numel)) for reader in readers)
        wide_a, wide_b = a.to(torch.float64), b.to(torch.float64)
        if same_dtype:
            integers = SAME_SIZE_INTEGERS[a.element_size()]  # bits: equal NaNs are equal, -0 and 0 differ
            differs = a.view(integers) != b.view(integers)
        else:
            differs = (wide_a != wide_b) & ~(wide_a.isnan() & wide_b.isnan())
        where = differs.nonzero().view(-1)
        if not len(where):
            continue
        num_different += len(where)
        if first is None:
            at = int(where[0])
            index = tuple(int(each) for each in np.unravel_index(start + at, shape))
            first = (index, float(a[at]), float(b[at]))
        wide_a, wide_b = wide_a[where], wide_b[where]
        finite = wide_a.isfinite() & wide_b.isfinite()
        gap = (wide_a - wide_b)[finite].abs()
        size = torch.maximum(wide_a.abs(), wide_b.abs())[finite]
        if len(gap):
            absolute = max(absolute, float(gap.max()))
            relative = max(relative, float((gap / size.clamp_min(torch.finfo(torch.float64).tiny)).max()))
    return ValueDifferences(numel, num_different, first, absolute, relative)


def other_fields(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, value in A, value in B) for each leaf that differs between two JSON trees.

    A missing value is "absent".
    """
    ours, theirs = dict(flat(one)), dict(flat(other))
    for key in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(key, "absent"), theirs.get(key, "absent")
        if a != b:
            yield key, a, b


class _FlatReader:
    """A reader for flat ranges of one tensor's elements, in the widest dtype of its pieces."""

    def __init__(self, candidate: Candidate, name: str, kind: Kind) -> None:
        self._folder, self._name, self._kind = candidate.folder, name, kind
        self._manifest = candidate.manifest
        self._shape = self._manifest.tensors[name].shape
        saved = [TORCH_DTYPES[dtype] for dtype in tensors_of(self._manifest)[name, kind].dtypes]
        self.dtype = reduce(torch.promote_types, saved)

    def read(self, start: int, stop: int) -> torch.Tensor:
        values = torch.empty(stop - start, dtype=self.dtype)
        box = tuple((0, size) for size in self._shape)
        load(self._folder, self._manifest, [Shard(self._name, self._kind, self._shape, box, start, values)])
        return values


def _verdict(one: Tensor | None, other: Tensor | None) -> Verdict | None:
    if one is None:
        return "only in B"
    if other is None:
        return "only in A"
    if one.shape != other.shape:
        return "other shape"
    if one.dtypes != other.dtypes or len(one.dtypes) > 1:
        return "other dtype"
    return "other values" if one.fingerprint != other.fingerprint else None
