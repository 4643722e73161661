"""The optimizer's state of one owned part of a bucket, in its stored form.

    kind         wide (accumulation dtype)                    narrow (bf16 runs, by choice)
    master       the exact weights; the parameters themselves `masters: split`   the upper half of its bits is the parameter, the
                 in fp32 and float64 runs, and if frozen                         lower half a remainder of 16 bits: exact
    moments      the optimizer's moments (its record)         `moments: bf16`    rounded after each step
    ema          the moving average of the masters            -

Bytes per parameter of a bf16 run with AdamW's two moments, weight and fp32 main grad included:
wide 2 + 4 + 12 / dp; both narrow 2 + 4 + 6 / dp; 4 / dp more with `optimizer.ema`.

A split master is its rounding to bf16, ties away from zero, and a remainder to add to these bits, -2^15 to 2^15 - 1. (A cast
rounds ties to even, which a signed 16-bit remainder cannot undo. The two differ for one value in 2^17, by one step of bf16.)

A bf16 moment follows its average while a step changes it by more than half of the last of its 8 bits, 2^-9 of its value. It
stops within 2^-9 / (1 - beta) of its target: 4 % of the second moment for beta2 = 0.95.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from triaxis.engine.config.optimizer_kinds import EMA, MASTER, StateKind
from triaxis.engine.config.training import PrecisionConfig
from triaxis.engine.numerics.precision import accumulation_dtype

_HALF_BITS = 16


@dataclass(frozen=True, slots=True)
class StoredState:
    """Elements of one kind of state, in their stored form.

    Each element depends only on the tensors at its index, so a part of them can be cut out and widened by itself.

    Attributes:
        tensors: one tensor [n]; of split masters two, the weights and the remainders [n].
        dtype: accumulation dtype of the widened elements.
    """

    tensors: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, where: slice, /) -> "StoredState":
        return self.over([tensor[where] for tensor in self.tensors])

    def over(self, tensors: Sequence[torch.Tensor]) -> "StoredState":
        """Return this form with other tensors, such as copies."""
        return replace(self, tensors=tuple(tensors))

    def widened(self) -> torch.Tensor:
        """Return the elements [n] in the accumulation dtype; the tensor itself if it has that dtype."""
        if len(self.tensors) == 1:
            return self.tensors[0].to(self.dtype)
        parameters, remainders = self.tensors
        return read_master(parameters, remainders)

    def cpu(self) -> torch.Tensor:
        """Return the elements [n] in the accumulation dtype and in host memory."""
        return self.widened().cpu()


class OptimizerState:
    """Master, moments and average of flat `parameters` (in the run's dtype), which hold their initial values.

    Args:
        parameters: a view of the flat buffer.
        precision: stored forms of masters and moments.
        kinds: the optimizer's kinds, the master first.
        is_frozen: whether the parameters never change; they are then their own masters.

    Attributes:
        wide: accumulation dtype of reads and writes.
    """

    def __init__(
        self,
        parameters: torch.Tensor,
        precision: PrecisionConfig,
        kinds: Sequence[StateKind],
        *,
        is_frozen: bool = False,
    ) -> None:
        self._parameters = parameters
        self.wide = accumulation_dtype(parameters.dtype)
        if is_frozen:
            master = parameters
        elif precision.masters == "split" and parameters.dtype != self.wide:
            master = torch.zeros_like(parameters, dtype=torch.int16)
        else:
            # `to` returns the view itself where the dtypes agree: then the master is the parameter.
            master = parameters.to(self.wide)
        moments = parameters.dtype if precision.moments == "bf16" else self.wide
        self._kept: dict[StateKind, torch.Tensor] = {}
        for kind in kinds:
            dtype = self.wide if kind == EMA else moments
            self._kept[kind] = master if kind == MASTER else torch.zeros_like(parameters, dtype=dtype)
        self.restart_average()

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """Return the kinds of this part, the master first."""
        return tuple(self._kept)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors besides the parameters."""
        return [tensor for tensor in self._kept.values() if tensor is not self._parameters]

    def stored(self, kind: StateKind) -> StoredState:
        """Return one kind in its stored form; the tensors are the live ones."""
        kept = self._kept[kind]
        is_split = kind == "master" and kept.dtype == torch.int16
        return StoredState((self._parameters, kept) if is_split else (kept,), self.wide)

    def read(self, kind: StateKind) -> torch.Tensor:
        """Return one kind in the accumulation dtype; the stored tensor itself if it has that dtype."""
        return self.stored(kind).widened()

    def write(self, values: Mapping[StateKind, torch.Tensor]) -> None:
        """Store values in the accumulation dtype; the parameters follow their masters."""
        for kind, value in values.items():
            kept = self._kept[kind]
            if kind == "master":
                write_master(self._parameters, kept, value)
            elif kept is not value:
                kept.copy_(value)

    def restart_average(self) -> None:
        """Set the moving average to the masters, as at the start of a run; do nothing if there is none."""
        if EMA in self._kept:
            self._kept[EMA].copy_(self.read(MASTER))

    def update_average(self, master: torch.Tensor, decay: float, skip: torch.Tensor) -> None:
        """Move the average towards the updated masters [n]: e <- e + (1 - decay) (w - e).

        Args:
            decay: decay of `optimizer.ema`.
            skip: a bool on the device; True changes no bit.
        """
        average = self._kept[EMA]
        # Three roundings, as in a plain loop and in the compiled update; `lerp` and `add` with a factor may fuse two of them.
        moved = (master - average).mul_(1 - decay).add_(average)
        torch.where(skip, average, moved, out=average)

    def part(self, where: slice) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor], torch.Tensor | None]:
        """Return stored elements: parameters, masters (None: the parameters are the masters), moments, and average (or None)."""
        master, average = self._kept[MASTER], self._kept.get(EMA)
        beside = None if master is self._parameters else master[where]
        moments = [kept[where] for kind, kept in self._kept.items() if kind not in (MASTER, EMA)]
        return self._parameters[where], beside, moments, None if average is None else average[where]


def read_master(parameters: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Compute the exact weights from bf16 weights and the remainders `kept`; return `kept` itself if it is the master."""
    if kept.dtype != torch.int16:
        return kept
    upper = parameters.view(torch.int16).to(torch.int32)
    return (upper << _HALF_BITS).add_(kept).view(accumulation_dtype(parameters.dtype))


def write_master(parameters: torch.Tensor, kept: torch.Tensor, value: torch.Tensor) -> None:
    """Store the exact weights `value` in `kept` (split: their remainders), and their rounding in the parameters."""
    if kept.dtype == torch.int16:
        # Half a unit of the upper half is added before the lower half is cut off, so ties go away from zero.
        bits = value.view(torch.int32)
        upper = (bits + (1 << (_HALF_BITS - 1))) >> _HALF_BITS
        parameters.view(torch.int16).copy_(upper)
        kept.copy_(bits - (upper << _HALF_BITS))
        return
    if kept is not value:
        kept.copy_(value)
    if kept is not parameters:
        parameters.copy_(kept)
