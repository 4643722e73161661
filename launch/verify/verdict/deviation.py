"""Measure the distance between two tensors, by sums that add up over ranks."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deviation:
    """Sums over the elements of a tensor `got` and of the tensor `wanted`.

    Attributes:
        wanted_square, got_square: sums of wanted^2 and of got^2.
        product: sum of wanted x got.
        error_square: sum of (got - wanted)^2; infinite if any element is not finite.
    """

    wanted_square: float
    got_square: float
    product: float
    error_square: float

    def __add__(self, other: "Deviation") -> "Deviation":
        return Deviation(
            self.wanted_square + other.wanted_square,
            self.got_square + other.got_square,
            self.product + other.product,
            self.error_square + other.error_square,
        )

    def shared(self, copies: int) -> "Deviation":
        """Divide the sums by the number of copies. Adding up all copies then gives their mean."""
        squares = (self.wanted_square, self.got_square, self.product, self.error_square)
        return Deviation(*(square / copies for square in squares))

    @property
    def wanted_norm(self) -> float:
        return math.sqrt(self.wanted_square)

    @property
    def got_norm(self) -> float:
        return math.sqrt(self.got_square)

    @property
    def error(self) -> float:
        """Euclidean norm of `got` - `wanted`."""
        return math.sqrt(self.error_square)

    @property
    def factor(self) -> float | None:
        """The f for which f x wanted is nearest to `got`. None: `wanted` is zero."""
        return self.product / self.wanted_square if self.wanted_square else None

    @property
    def is_multiple(self) -> bool:
        """Whether `got` is `factor` x wanted, to one part in 10^4."""
        if self.factor is None or not math.isfinite(self.error_square):
            return False
        beside = max(0.0, self.got_square - self.factor * self.product)
        return beside <= 1e-8 * max(self.got_square, self.wanted_square)


NOTHING = Deviation(0.0, 0.0, 0.0, 0.0)
