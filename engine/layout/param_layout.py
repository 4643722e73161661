"""The place of every parameter in the flat buffers, and its data-parallel owner.

The layout is computed first, then read by grad buffers, the optimizer and checkpoints.

    buffer (one per BufferKey)   | bucket 0                  | bucket 1                  | ..
    bucket                       | layers.9.. | layers.8.. pad | layers.7.. | .. pad      |
    owned by dp rank 0 1 2 3     |  0  |  1  |  2  |  3  ..  |  0  |  1  |  2  |  3  ..  |

Parameters are in the order in which the backward finishes them (last layer first): a bucket completes early, and its reduce-scatter
runs under the rest of the backward. Each dp rank owns an equal, contiguous part of every bucket (ZeRO-1) with its master weights
and moments. Padding at a bucket's end makes the parts equal; it belongs to no parameter and is never saved or counted.

Parameters of one buffer have the same replicas, the same further sum and the same data-parallel ranks (`BufferKey`), so an owned
part is summed, counted and clipped as a whole, and all replicas cut it identically.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triaxis.engine.layout.shard_spec import ParamRecord, ReduceAxis, ReplicaAxis


@dataclass(frozen=True, slots=True)
class BufferKey:
    """The common properties of a buffer's parameters.

    Attributes:
        replicas: the axis over which other ranks hold the same parameters, or None.
        sum_over: the axis of the second gradient sum, or None.
        reduce_over: the axis of the first one, over whose ranks the optimizer's state is cut.
        is_trained: they have gradients.
        is_frozen: no update changes them, and they have neither masters nor moments.
    """

    replicas: ReplicaAxis | None
    sum_over: ReplicaAxis | None
    reduce_over: ReduceAxis = "dp"
    is_trained: bool = True
    is_frozen: bool = False

    @classmethod
    def of(cls, record: ParamRecord) -> "BufferKey":
        """Return the key of one parameter."""
        is_trained = record.spec.is_trained
        return cls(record.replicas, record.sum_over, record.reduce_over, is_trained, record.is_frozen and is_trained)

    @property
    def is_updated(self) -> bool:
        """Return whether the optimizer changes them; their gradients are those that the norm and its tests read."""
        return self.is_trained and not self.is_frozen

    def __str__(self) -> str:
        if not self.is_trained:
            return "not trained"
        return f"{'frozen, ' if self.is_frozen else ''}{self._replication}"

    @property
    def _replication(self) -> str:
        if self.reduce_over == "expert_dp":
            return "experts"
        if self.replicas is None:
            return "sharded"
        return f"replicated over {self.replicas}" + (", summed" if self.sum_over else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter at [start, stop) of its buffer."""

    record: ParamRecord
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.record.numel


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A run [start, stop) of a buffer that is reduced and gathered in one call; its length is a multiple of dp."""

    start: int
    stop: int
    entries: tuple[Entry, ...]

    def owned(self, dp: int, dp_index: int) -> tuple[int, int]:
        """Return the part of the buffer that this data-parallel rank owns."""
        part = (self.stop - self.start) // dp
        return self.start + dp_index * part, self.start + (dp_index + 1) * part


@dataclass(frozen=True, slots=True)
class Segment:
    """The overlap of one parameter with one owned part: the unit of optimizer steps and checkpoints.

    Attributes:
        record: the parameter.
        start, stop: range in the row-major local box of the parameter (padding rows excluded).
        offset: of `start`, in the buffer.
    """

    record: ParamRecord
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """All parameters of one key, in buckets."""

    key: BufferKey
    numel: int
    buckets: tuple[BucketLayout, ...]

    def segments(self, dp: int, dp_index: int) -> Iterator[Segment]:
        """Yield the pieces of parameters that this data-parallel rank owns, in buffer order."""
        for bucket in self.buckets:
            owned_start, owned_stop = bucket.owned(dp, dp_index)
            for entry in bucket.entries:
                start = max(owned_start, entry.start)
                stop = min(owned_stop, entry.start + entry.record.box_numel)
                if start < stop:
                    yield Segment(entry.record, start - entry.start, stop - entry.start, start)


def layout_parameters(
    records: Sequence[ParamRecord], *, dp: int, bucket_numel: int, expert_dp: int = 1, alignment: int = 64
) -> tuple[BufferLayout, ...]:
    """Lay out one rank's parameters.

    Args:
        records: in forward order.
        dp: size of the axis that dense gradients are reduced over.
        bucket_numel: a bucket is closed once it holds this many elements.
        expert_dp: size of the axis that gradients of experts are reduced over.
        alignment: every owned part is padded to a multiple of this many elements (256 bytes of fp32).

    The layout depends only on local shapes and keys, so that all tp ranks of a stage, and all replicas, agree on it.
    """
    by_key: dict[BufferKey, list[list[ParamRecord]]] = {}
    for record in records:
        groups = by_key.setdefault(BufferKey.of(record), [])
        if record.spec.fused_with_previous and groups and _follows(records, groups[-1][-1], record):
            groups[-1].append(record)
        else:
            groups.append([record])
    owners = {"dp": dp, "expert_dp": expert_dp}
    return tuple(
        _fill_buckets(key, list(reversed(groups)), owners[key.reduce_over] * alignment, bucket_numel)
        for key, groups in by_key.items()
    )


def _follows(records: Sequence[ParamRecord], first: ParamRecord, second: ParamRecord) -> bool:
    """Return whether `second` directly follows `first` in forward order: only then do they share a GEMM."""
    index = next(index for index, record in enumerate(records) if record is first)
    return records[index + 1] is second


def _fill_buckets(
    key: BufferKey, groups: Sequence[Sequence[ParamRecord]], multiple: int, bucket_numel: int
) -> BufferLayout:
    buckets: list[BucketLayout] = []
    entries: list[Entry] = []
    start = at = 0
    for number, group in enumerate(groups, start=1):
        for record in group:
            entries.append(Entry(record, at))
            at += record.numel
        if at - start >= bucket_numel or number == len(groups):
            at = start + -(-(at - start) // multiple) * multiple
            buckets.append(BucketLayout(start, at, tuple(entries)))
            start, entries = at, []
    return BufferLayout(key, at, tuple(buckets))
