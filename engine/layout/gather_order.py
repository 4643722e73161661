"""The order in which a rank gathers the weights of cut buckets into slots (ZeRO-3).

    buckets  7 6 5 4 3 2 1 0        the first layer is the last bucket; bucket i always uses slot i mod 2
    forward  7 > 6 > .. > 0         at the first use of 5, bucket 4 is gathered into the slot of 6, which is done
    backward 0 > 1 > .. > 7         at the first use of 2, bucket 3 is gathered into the slot of 1; 0 and 1 are still there

A pass in the same direction as the one before it (evaluation, gpipe) begins with one gather that nothing hides. A pass that turns
back finds its first `slots` buckets in place.

Embedding and head are buckets 1 and 0 of a buffer with one slot. Their forward posts the head's gather later, at the first use of
a layer (`next_of_forward`); a backward finds the head in place and does not read the embedding.
"""


class GatherOrder:
    """Which buckets are in the slots, and which are gathered at a use.

    Args:
        buckets: number of buckets.
        slots: number of slots.
    """

    def __init__(self, buckets: int, slots: int) -> None:
        self._buckets, self._slots = buckets, slots
        self._held: list[int | None] = []
        self._last, self._step = buckets, -1
        self.clear()

    def use(self, bucket: int) -> list[int]:
        """List the buckets to gather now: the used one, then the next one in this direction.

        A bucket that is in its slot is left out, and so is a next one that needs the used one's slot. Those listed count as in
        their slots from now on.
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
        """Name the bucket to gather now into the only slot, whose bucket is done; None: there is none.

        A named bucket counts as in the slot from now on.
        """
        following = self._last - 1
        if self._slots > 1 or following < 0 or self._held[0] != self._last:
            return None
        self._held[0] = following
        return following

    def clear(self) -> None:
        """Forget the contents of all slots, because the weights have changed; the next pass is a forward."""
        self._held = [None] * self._slots
        self._last, self._step = self._buckets, -1
