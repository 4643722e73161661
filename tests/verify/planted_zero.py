"""Bugs in the main grads and weights of which a rank keeps its part (ZeRO-2 and 3), planted by name; see `planted.py`."""

from triaxis.engine.optimizer.grad_buffer import Bucket, Slot, WeightSlots


def a_microbatchs_sum_is_added_twice() -> None:
    keep = Bucket.keep_sum

    def twice(self: Bucket) -> None:
        is_later = self.has_sum and self.reducing is not None
        keep(self)
        if is_later:
            self.owned_grads += self.own_part

    Bucket.keep_sum = twice  # type: ignore[method-assign]


def a_slot_is_reused_before_its_sum_is_kept() -> None:
    free = Slot.free

    def early(self: Slot) -> None:
        if self.sending is not None and self.sending.reducing is not None:
            self.sending.reducing.wait()
            self.grads.zero_()
        free(self)

    Slot.free = early  # type: ignore[method-assign]


def a_layer_keeps_its_weights_of_the_step_before() -> None:
    """The slots are not dropped after an update, so the first layers of the next forward are old."""
    clear = WeightSlots.clear

    def stale(self: WeightSlots) -> None:
        held, used = list(self._order._held), self._used
        clear(self)
        self._order._held, self._used = held, used

    WeightSlots.clear = stale  # type: ignore[method-assign]
