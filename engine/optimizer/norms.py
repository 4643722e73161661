"""The norms of one group of parameters in one step (no torch here); `group_norms.py` measures them."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of one group; nan where the step's gradients are not finite.

    Attributes:
        grad: of its gradients, before clipping.
        weight: of its weights, before the update.
        update: of the change of its weights; 0 where the step has updated nothing.
    """

    grad: float
    weight: float
    update: float

    @property
    def relative_update(self) -> float:
        """Return |dW| / |W|; nan for weights of zero."""
        return self.update / self.weight if self.weight else math.nan
