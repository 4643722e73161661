"""The record for a parameter: its identity, and one rank's part of it.

`ParamSpec` holds the model's facts: name, logical global shape, initialisation, weight decay, the dim that is cut. `ParamRecord`
adds one rank's facts: its box in the logical tensor, who holds replicas, and the axis over which their gradients must still be
summed. Initialisation, buffers, the optimizer, clipping and checkpoints read the record instead of guessing from a tensor's shape.

    logical  layers.3.attention.kv.weight  [2, kv_heads, d, h]      tp_dim = 1
    tp = 2, kv_heads = 4    rank 0 holds the box [0:2, 0:2, 0:d, 0:h]      rank 1 holds [0:2, 2:4, 0:d, 0:h]
    tp = 8, kv_heads = 4    ranks 0 and 1 both hold [0:2, 0:1, 0:d, 0:h]: replicas over "kv_replicas"

Experts are cut differently: their number over ep, and each one's width over etp, which may differ from tp.

    logical  layers.3.mlp.experts.down.weight       [E, h, f]               ep_dim = 0, tp_dim = 2

The physical tensor is the box, row-major. Only the padded vocabulary has more rows. Rows past the logical shape are zero, get a
gradient of exactly zero, and are never saved or counted.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Box = tuple[tuple[int, int], ...]
"""(start, stop) for each dim of the logical tensor."""

ReplicaAxis = Literal["tp", "kv_replicas", "ends"]
"""Axes over which a parameter may be replicated; "ends" is the first and the last pipeline stage."""

ReduceAxis = Literal["dp", "expert_dp"]
"""Axes over which gradients are reduced and the optimizer's state is cut, for dense parameters and for experts."""

Update = Literal["optimizer", "rule", "frozen"]
"""What changes a parameter: the optimizer, a rule of its own, or nothing."""

_LAYER = re.compile(r"layers\.(\d+)\.")

REDUCE_AXES: tuple[ReduceAxis, ...] = get_args(ReduceAxis)


@dataclass(frozen=True, slots=True)
class Init:
    """A parameter's initial value: zeros, ones, or normal with mean 0 and standard deviation `std`."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One model parameter, independent of the layout.

    Attributes:
        name: unique name, with the global layer number (`layers.3.mlp.down.weight`).
        shape: logical global shape.
        init: initial value.
        decay: whether weight decay applies (matrices: yes; norms and biases: no).
        tp_dim: dim that tensor parallelism cuts (for experts, the dim that etp cuts); None if every tp rank holds it whole.
        padded_size: size along `tp_dim` with padding (only the vocabulary's); None: no padding.
        grad_is_partial: whether each tp replica computes only a part of the gradient. `sequence`: yes under sequence parallelism,
            because it acts on a sequence shard. `always`: it acts only on this rank's heads or tokens. Else `never`.
        tied_ends: whether it is on the first and the last stage (the tied embedding).
        fused_with_previous: whether it shares a GEMM with the spec before it; if both are cut alike, they must be adjacent in
            memory.
        ep_dim: expert dim, which expert parallelism cuts; None for all other parameters.
        is_trained: whether it has gradients. Otherwise a rule of its own changes it, and it has the accumulation dtype.
        in_backward: whether its gradient is complete in the backward even in schedules that defer weight gradients, because no
            linear layer reads it.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    decay: bool = True
    tp_dim: int | None = None
    padded_size: int | None = None
    grad_is_partial: Literal["never", "sequence", "always"] = "never"
    tied_ends: bool = False
    fused_with_previous: bool = False
    ep_dim: int | None = None
    is_trained: bool = True
    in_backward: bool = False

    @property
    def numel(self) -> int:
        """Number of logical elements, padding excluded."""
        return math.prod(self.shape)

    @property
    def layer(self) -> int | None:
        """Global layer number; None outside the layers."""
        number = _LAYER.match(self.name)
        return None if number is None else int(number[1])

    @property
    def unit(self) -> int | str:
        """The layer's number, or the parameter's name outside the layers. A sharded bucket holds one unit."""
        return self.name if self.layer is None else self.layer

    @property
    def is_untied_end(self) -> bool:
        """Whether this is a vocabulary matrix that only the embedding or only the head uses. Each is a model end."""
        return self.padded_size is not None and not self.tied_ends

    @property
    def is_layer_matrix(self) -> bool:
        """Whether it is the weight of a linear layer inside a layer of the model."""
        return self.layer is not None and len(self.shape) > 1 and self.decay and not self.in_backward


@dataclass(frozen=True, slots=True)
class ParamRecord:
    """One rank's part of one parameter.

    Attributes:
        spec: the parameter.
        box: part of the logical tensor held here (empty in a dim where start == stop: pure padding).
        local_shape: the physical tensor's shape: the box, plus the vocabulary's padding rows.
        replicas: axis over which other ranks hold the same box, or None. The axis `reduce_over` is never named here, since every
            parameter is replicated over it.
        sum_over: axis over which the replicas' gradients are partial sums, added after the data-parallel reduction; None if each
            replica computes the whole gradient.
        reduce_over: axis over which gradients from other samples are summed.
        is_frozen: whether updates leave it unchanged (`optimizer.groups`); its gradient is computed all the same.
    """

    spec: ParamSpec
    box: Box
    local_shape: tuple[int, ...]
    replicas: ReplicaAxis | None
    sum_over: ReplicaAxis | None
    reduce_over: ReduceAxis = "dp"
    is_frozen: bool = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def update(self) -> Update:
        """What changes the parameter: the optimizer, a rule of its own, or (if frozen) nothing."""
        if not self.spec.is_trained:
            return "rule"
        return "frozen" if self.is_frozen else "optimizer"

    @property
    def numel(self) -> int:
        """Number of physical elements on this rank, padding included."""
        return math.prod(self.local_shape)

    @property
    def box_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.box)

    @property
    def box_numel(self) -> int:
        """Number of elements on this rank, padding rows excluded. They come first in the row-major local tensor."""
        return math.prod(self.box_shape)


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """A rank's ep and etp indices among the ranks with one set of experts, and both axes' sizes."""

    ep: int = 1
    ep_index: int = 0
    etp: int = 1
    etp_index: int = 0


ALL_EXPERTS = ExpertPlace()
"""Place for a rank that holds every expert whole."""


def localize(
    spec: ParamSpec,
    *,
    tp: int,
    tp_index: int,
    sequence_parallel: bool,
    experts: ExpertPlace = ALL_EXPERTS,
    is_frozen: bool = False,
) -> ParamRecord:
    """Build the record for tp rank `tp_index`'s part of `spec`. For expert weights, `experts` determines the part."""
    box = [(0, size) for size in spec.shape]
    local_shape = list(spec.shape)
    if spec.ep_dim is not None:
        assert spec.tp_dim is not None, f"{spec.name}: experts are cut over etp"
        box[spec.ep_dim] = cut(spec.shape[spec.ep_dim], experts.ep, experts.ep_index)
        box[spec.tp_dim] = cut(spec.shape[spec.tp_dim], experts.etp, experts.etp_index)
        held = tuple(stop - start for start, stop in box)
        return ParamRecord(spec, tuple(box), held, None, None, "expert_dp", is_frozen)
    replicas: ReplicaAxis | None = None
    if spec.tp_dim is None:
        replicas = "tp"
    else:
        size = spec.padded_size or spec.shape[spec.tp_dim]
        start, stop = cut(size, tp, tp_index)
        if size < tp:
            replicas = "kv_replicas"
        logical = spec.shape[spec.tp_dim]
        box[spec.tp_dim] = (min(start, logical), min(stop, logical))
        local_shape[spec.tp_dim] = stop - start
    sum_over: ReplicaAxis | None = None
    if replicas == "kv_replicas" or (
        replicas == "tp"
        and (spec.grad_is_partial == "always" or (spec.grad_is_partial == "sequence" and sequence_parallel))
    ):
        sum_over = replicas
    if spec.tied_ends:
        assert replicas is None, f"{spec.name}: a tied parameter is cut over tp"
        replicas = sum_over = "ends"
    return ParamRecord(spec, tuple(box), tuple(local_shape), replicas, sum_over, is_frozen=is_frozen)


def cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """Compute the range (start, stop) of the items in part `index`; with fewer items than parts, neighbouring parts share an item.

    One of `size` and `parts` divides the other (a rule in `engine/config/rules/sizes.py`).
    """
    assert size % parts == 0 or parts % size == 0, f"{size} items cannot be cut into {parts} parts"
    if size >= parts:
        per_part = size // parts
        return index * per_part, (index + 1) * per_part
    item = index * size // parts
    return item, item + 1


def box_runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """Yield the box as contiguous runs (start, stop) in the row-major logical tensor, in the box's row-major order."""
    if any(start == stop for start, stop in box):
        return
    # The trailing dims that the box covers whole form one contiguous run together with the dim before them.
    dim = len(shape)
    while dim > 0 and box[dim - 1] == (0, shape[dim - 1]):
        dim -= 1
    inner = math.prod(shape[dim:])
    if dim == 0:
        yield 0, inner
        return
    start, stop = box[dim - 1]
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]

    def outer(d: int, offset: int) -> Iterator[int]:
        if d == dim - 1:
            yield offset
            return
        for at in range(*box[d]):
            yield from outer(d + 1, offset + at * strides[d])

    for offset in outer(0, 0):
        yield offset + start * inner, offset + stop * inner
