"""The order in which a rank gathers buckets of sharded weights into slots (ZeRO-3).

    buckets  7 6 5 4 3 2 1 0        the first layer is the last bucket; bucket i always uses slot i mod 2
    forward  7 > 6 > .. > 0         at the first use of 5, bucket 4 is gathered into the slot of 6, which is done
    backward 0 > 1 > .. > 7         at the first use of 2, bucket 3 is gathered into the slot of 1; 0 and 1 are still there

A pass in the same direction as the pass before (evaluation, gpipe) starts with one gather that overlaps no computation. A pass in
the opposite direction finds its first `slots` buckets already gathered.

Embedding and head have another buffer, with one slot; in this buffer, the embedding is bucket 1 and the head bucket 0. In the
forward, the head is gathered when the first layer is used (`next_of_forward`). In the backward, the head is still in the slot,
and the embedding is not read.
"""


class GatherOrder:
    """Tracks each slot's bucket, and decides what to gather before a bucket's weights are read.

    Args:
        buckets: number of buckets.
        slots: number of slots, each with memory for one gathered bucket.
    """

    def __init__(self, buckets: int, slots: int) -> None:
        self._buckets, self._slots = buckets, slots
        self._held: list[int | None] = []
        self._last, self._step = buckets, -1
        self.clear()

    def use(self, bucket: int) -> list[int]:
        """List the buckets to gather now: `bucket`, then the next one in the pass's direction.

        A bucket already in its slot is left out. The next bucket is also left out if it needs `bucket`'s slot. From now on, this
        object counts each listed bucket as in its slot.
        """
        if abs(bucket - self._last) == 1:
            self._step = bucket - self._last
        self._last = bucket
        following = bucket + self._step
        wanted = [bucket]
        if 0 <= following < self._buckets and following % self._slots != bucket % self._slots:
            wanted.append(following)
        gathered = [each for each in wanted if self._held[each % self._slots] != each]
        for each in gathered:
            self._held[each % self._slots] = each
        return gathered

    def next_of_forward(self) -> int | None:
        """Return the forward's next bucket, to gather into the only slot; None if none.

        The caller no longer needs the bucket in the slot. From now on, this object counts the returned bucket as in the slot.
        """
        following = self._last - 1
        if following < 0 or self._held[0] != self._last:
            return None
        self._held[0] = following
        return following

    def clear(self) -> None:
        """Forget the contents of all slots, because the weights have changed; the next pass is a forward."""
        self._held = [None] * self._slots
        self._last, self._step = self._buckets, -1
