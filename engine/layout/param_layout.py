"""Every parameter's place in the flat buffers, and its data-parallel owner.

The layout is computed first, then read by grad buffers, the optimizer and checkpoints.

    buffer (one per BufferKey)   | bucket 0                  | bucket 1                  | ..
    bucket                       | layers.9.. | layers.8.. pad | layers.7.. | .. pad      |
    owned by dp rank 0 1 2 3     |  0  |  1  |  2  |  3  ..  |  0  |  1  |  2  |  3  ..  |

Parameters lie in the order in which the backward finishes them, last layer first. A bucket therefore completes early, and its
reduce-scatter runs under the rest of the backward. Each dp rank owns an equal, contiguous part of every bucket (ZeRO-1) with its
master weights and moments. Padding at a bucket's end makes the parts equal; it belongs to no parameter and is never saved or
counted.

All parameters in a buffer share a `BufferKey`: the same axes for replicas and for gradient sums. So one call sums the gradients of
an owned part, and the norm counts the part once. All replicas cut the buffer identically.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from triaxis.engine.layout.shard_spec import ParamRecord, ReduceAxis, ReplicaAxis, Update

Cut = Literal["state", "gradients", "parameters"]
"""The optimizer's state alone (ZeRO-1), main grads too (ZeRO-2), or weights too (ZeRO-3)."""

_CUTS: tuple[Cut, ...] = get_args(Cut)


@dataclass(frozen=True, slots=True)
class BufferKey:
    """Properties that all parameters in a buffer share.

    Attributes:
        replicas: axis over which other ranks hold the same parameters, or None.
        sum_over: axis over which the replicas' gradients are partial sums, added after the sum over `reduce_over`; None: they
            are whole.
        reduce_over: axis over which gradients from other samples are summed; its ranks (in each HSDP replica) own one part of
            the optimizer state each.
        update: what changes the parameters: the optimizer, a rule of their own, or nothing (frozen).
        cut: what is sharded over the owner ranks: optimizer state, main grads too, or weights too.
        of_ends: whether the buffer holds the sharded embedding and head; layers have other buffers.
    """

    replicas: ReplicaAxis | None
    sum_over: ReplicaAxis | None
    reduce_over: ReduceAxis = "dp"
    update: Update = "optimizer"
    cut: Cut = "state"
    of_ends: bool = False

    @classmethod
    def of(cls, record: ParamRecord, zero: int = 1, owners: int = 1, ends: int = 0) -> "BufferKey":
        """Build one parameter's key.

        Args:
            zero: stage of ZeRO. From 2 on, the gradients of the layers' matrices are sharded. Embedding and head are sharded
                only if this saves memory: their shared scratch slot plus this rank's parts must be smaller than both matrices.
            owners: number of ranks that own one part each; with one rank, nothing is sharded.
            ends: how many of embedding and head this rank holds, if untied and with the same update.
        """
        of_ends = zero > 1 and owners > 2 and record.spec.is_untied_end and ends > 1
        cut = _CUTS[zero - 1] if of_ends or (owners > 1 and record.spec.is_layer_matrix) else "state"
        return cls(record.replicas, record.sum_over, record.reduce_over, record.update, cut, of_ends)

    @property
    def num_slots(self) -> int:
        """Number of scratch slots, one whole bucket each, in a buffer whose buckets are sharded.

        Layers have two slots: one is filled while the other is sent. Embedding and head share one, since they are used in turn.
        """
        return 1 if self.of_ends else 2

    @property
    def is_trained(self) -> bool:
        """Whether the buffer's parameters have gradients. Those with an update rule of their own have none."""
        return self.update != "rule"

    @property
    def is_updated(self) -> bool:
        """Whether the optimizer changes the parameters. Only then does the gradient norm include their gradients."""
        return self.update == "optimizer"

    def __str__(self) -> str:
        if not self.is_trained:
            return "not trained"
        return f"{'' if self.is_updated else 'frozen, '}{self._replication}"

    @property
    def _replication(self) -> str:
        if self.reduce_over == "expert_dp":
            return "experts"
        if self.replicas is None:
            return "sharded"
        return f"replicated over {self.replicas}" + (", summed" if self.sum_over else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter at [start, stop) in its buffer."""

    record: ParamRecord
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.record.numel


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A buffer range [start, stop) that is reduced and gathered in one call. The number of owners divides its length."""

    start: int
    stop: int
    entries: tuple[Entry, ...]

    def owned(self, dp: int, dp_index: int) -> tuple[int, int]:
        """Compute the range (start, stop) in the buffer that this data-parallel rank owns."""
        part = (self.stop - self.start) // dp
        return self.start + dp_index * part, self.start + (dp_index + 1) * part


@dataclass(frozen=True, slots=True)
class Segment:
    """The overlap between one parameter and one owned part: the unit for optimizer steps and checkpoints.

    Attributes:
        record: the parameter.
        start, stop: range in the parameter's row-major local box (padding rows excluded).
        offset: buffer position that corresponds to `start`.
    """

    record: ParamRecord
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One buffer: all parameters with the same `BufferKey`, in buckets. `numel` is its length, padding included."""

    key: BufferKey
    numel: int
    buckets: tuple[BucketLayout, ...]

    def slot_numels(self) -> list[int]:
        """List each slot's length in elements, that of its longest bucket. Bucket i uses slot i mod (number of slots)."""
        lengths, slots = [bucket.stop - bucket.start for bucket in self.buckets], self.key.num_slots
        return [max(lengths[slot::slots]) for slot in range(min(slots, len(lengths)))]

    def segments(self, dp: int, dp_index: int) -> Iterator[Segment]:
        """Yield the parameter pieces that this data-parallel rank owns, in buffer order."""
        for bucket in self.buckets:
            owned_start, owned_stop = bucket.owned(dp, dp_index)
            for entry in bucket.entries:
                start = max(owned_start, entry.start)
                stop = min(owned_stop, entry.start + entry.record.box_numel)
                if start < stop:
                    yield Segment(entry.record, start - entry.start, stop - entry.start, start)


def layout_parameters(
    records: Sequence[ParamRecord],
    *,
    dp: int,
    bucket_numel: int,
    expert_dp: int = 1,
    zero: int = 1,
    alignment: int = 64,
) -> tuple[BufferLayout, ...]:
    """Lay out one rank's parameters.

    The layout depends only on local shapes and keys, so all tp ranks in a stage, and all replicas, agree on it.

    Args:
        records: this rank's parameters, in forward order.
        dp: number of ranks that own a part of the dense parameters' state each.
        bucket_numel: a bucket with at least this many elements gets no more. With sharded main grads, there is instead one bucket
            for each layer, the embedding and the head.
        expert_dp: number of ranks that own a part of the experts' state each.
        zero: stage of ZeRO (`BufferKey.of`).
        alignment: number of elements; every owned part is padded to a multiple (64 elements are 256 bytes in fp32).
    """
    owners = {"dp": dp, "expert_dp": expert_dp}
    ends = Counter(record.update for record in records if record.spec.is_untied_end)
    by_key: dict[BufferKey, list[list[ParamRecord]]] = {}
    for before, record in zip([None, *records], records, strict=False):
        groups = by_key.setdefault(BufferKey.of(record, zero, owners[record.reduce_over], ends[record.update]), [])
        # Only direct neighbors share a GEMM.
        if record.spec.fused_with_previous and groups and groups[-1][-1] is before:
            groups[-1].append(record)
        else:
            groups.append([record])
    return tuple(
        _fill_buckets(key, list(reversed(groups)), owners[key.reduce_over] * alignment, bucket_numel)
        for key, groups in by_key.items()
    )


def _fill_buckets(
    key: BufferKey, groups: Sequence[Sequence[ParamRecord]], multiple: int, bucket_numel: int
) -> BufferLayout:
    buckets: list[BucketLayout] = []
    entries: list[Entry] = []
    start = at = 0
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        for record in group:
            entries.append(Entry(record, at))
            at += record.numel
        if key.cut == "state":
            is_full = at - start >= bucket_numel
        else:
            is_full = following is not None and following[0].spec.unit != group[0].spec.unit
        if is_full or following is None:
            at = start + -(-(at - start) // multiple) * multiple
            buckets.append(BucketLayout(start, at, tuple(entries)))
            start, entries = at, []
    return BufferLayout(key, at, tuple(buckets))
