"""Numbers that FP8 loses, counted per linear layer and operand on every K-th step (`telemetry.fp8_interval`).

    forward     of X as the GEMM reads it, once per microbatch (not where a layer is replayed), and of W once
    backward    of dY as the gradient of the input reads it
    then        summed over the world and read by `triaxis.engine.telemetry.meters.fp8_shares`

The counts are of numbers other than zero, of those among them that became zero, and of those that were clamped. Each number counts
once over the world: what several tp ranks hold counts on the first, and weights on the first data- and context-parallel rank.
"""

from collections.abc import Callable, Sequence

import torch

from triaxis.engine.kernels.fp8.recipes import E4M3, E5M2, Quantised
from triaxis.engine.kernels.fp8.shares import ROLES, Role
from triaxis.engine.numerics.precision import accumulate

_FORMATS = {each.dtype: each for each in (E4M3, E5M2)}


def count_lost(matrix: torch.Tensor, rounded: Quantised) -> torch.Tensor:
    """Return int64 [3]: numbers of a matrix [rows, columns] that are not zero, that became zero, and that were clamped."""
    (rows, columns), (down, across) = matrix.shape, rounded.inverse.shape
    size = accumulate(matrix).abs()
    is_number = size != 0
    # Both zeros of a format have no bit but the sign.
    became_zero = is_number & (rounded.values.view(torch.uint8).bitwise_and(0x7F) == 0)
    most = rounded.inverse * _FORMATS[rounded.values.dtype].beyond
    was_clamped = size.reshape(down, rows // down, across, columns // across) > most[:, None, :, None]
    return torch.stack([is_number.sum(), became_zero.sum(), was_clamped.sum()])


class Fp8Counts:
    """The counts of one rank in a step.

    Args:
        linears: names of the FP8 layers of the whole model, alike on every rank.
        has_weights: this rank's weights count; other data- or context-parallel ranks have the same.
        is_replay: returns whether a layer is computed again in the backward.

    Attributes:
        step: numbers the counted steps; weights count once in each.
        is_open: a step is counted.
    """

    def __init__(
        self, linears: Sequence[str], device: torch.device, *, has_weights: bool, is_replay: Callable[[], bool]
    ) -> None:
        self.linears = tuple(linears)
        self.has_weights = has_weights
        self.is_replay = is_replay
        self.is_open = False
        self.step = 0
        self._rows = {name: row for row, name in enumerate(self.linears)}
        self._counts = torch.zeros(len(self.linears), len(ROLES), 3, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Begin a step that is counted."""
        self._counts = torch.zeros_like(self._counts)
        self.is_open = True
        self.step += 1

    def end(self) -> torch.Tensor:
        """Return this rank's counts int64 [layers, operands, 3] since `begin`; nothing more is counted."""
        self.is_open = False
        return self._counts

    def add(self, linear: str, role: Role, matrix: torch.Tensor, rounded: Quantised) -> None:
        """Count a matrix and what it was rounded to."""
        self._counts[self._rows[linear], ROLES.index(role)] += count_lost(matrix, rounded)
