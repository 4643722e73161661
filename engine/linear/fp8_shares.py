"""Counts the values that FP8 loses, on every K-th step (`telemetry.fp8_interval`).

    forward     counts X once per microbatch (not in a replay), and W once
    backward    counts dY as the input-gradient GEMM reads it

Each linear layer has three counts per operand: nonzero values, nonzero values that became zero, and clamped values. Each value
counts once over the world. If tp ranks hold the same tensor, only the first of them counts it. Weights are counted only by the
first data- and context-parallel rank. `triaxis.engine.telemetry.meters.fp8_shares` sums the counts over the world.
"""

from collections.abc import Callable, Sequence

import torch

from triaxis.engine.kernels.fp8.recipes import E4M3, E5M2, Quantised
from triaxis.engine.kernels.fp8.shares import ROLES, Role
from triaxis.engine.numerics.precision import accumulate

_FORMATS = {each.dtype: each for each in (E4M3, E5M2)}


def count_lost(matrix: torch.Tensor, rounded: Quantised) -> torch.Tensor:
    """Count a matrix's nonzero values, those that became zero, and those that were clamped, as int64 [3]."""
    (rows, columns), (down, across) = matrix.shape, rounded.inverse.shape
    size = accumulate(matrix).abs()
    is_number = size != 0
    # The mask drops the sign bit, the only bit that +0 and -0 may have.
    became_zero = is_number & (rounded.values.view(torch.uint8).bitwise_and(0x7F) == 0)
    # Values up to `beyond` round to the format's largest value; only larger ones are clamped.
    most = rounded.inverse * _FORMATS[rounded.values.dtype].beyond
    was_clamped = size.reshape(down, rows // down, across, columns // across) > most[:, None, :, None]
    return torch.stack([is_number.sum(), became_zero.sum(), was_clamped.sum()])


class Fp8Counts:
    """One rank's counts of nonzero, zeroed and clamped operand values in one step.

    Args:
        linears: names of all FP8 layers in the model, the same on every rank.
        has_weights: whether this rank counts its weights, as the first data- and context-parallel rank does.
        is_replay: function () -> whether a layer is being recomputed in the backward.

    Attributes:
        step: number of counted steps so far, the current one included; weights count once in each.
        is_open: whether the current step is counted.
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
        """Set the counts to zero before a counted step; layers add to them until `end`."""
        self._counts = torch.zeros_like(self._counts)
        self.is_open = True
        self.step += 1

    def end(self) -> torch.Tensor:
        """End the counted step. Return this rank's nonzero, zeroed and clamped values, int64 [layers, operands, 3]."""
        self.is_open = False
        return self._counts

    def add(self, linear: str, role: Role, matrix: torch.Tensor, rounded: Quantised) -> None:
        """Add an operand's numbers of nonzero, zeroed and clamped values. `rounded` is `matrix` in FP8."""
        self._counts[self._rows[linear], ROLES.index(role)] += count_lost(matrix, rounded)
