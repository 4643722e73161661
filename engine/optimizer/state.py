"""Optimizer state for one owned part of a bucket, in its stored form.

    kind       wide (accumulation dtype)                    narrow (bf16 runs, by choice)
    master     the exact weights                            `masters: split`    exact: the parameter holds the upper 16 bits,
                                                                                a remainder the lower 16
    moments    the optimizer's moments (`OptimizerKind`)    `moments: bf16`     rounded after each step
    ema        the masters' moving average                  -

In fp32 and float64 runs, and for frozen parameters, the parameters themselves are the masters.

Bytes per parameter in a bf16 run with AdamW's two moments, including the weight and its fp32 main grad: wide 2 + 4 + 12 / dp; both
narrow 2 + 4 + 6 / dp; 4 / dp more with `optimizer.ema`.

A split master has two parts: the parameter and a remainder. The parameter is the master rounded to bf16, ties away from zero. The
remainder, from -2^15 to 2^15 - 1, is the master's bits minus 2^16 x the parameter's bits. (A cast rounds ties to even,
which a signed 16-bit remainder cannot undo. The two roundings differ for one value in 2^17, by one bf16 step.)

A bf16 moment has 8 significant bits. A step changes the moment only if the change is above half its last bit, 2^-9 of its
value. The moment therefore stops within 2^-9 / (1 - beta) of its target: 4 % for the second moment with beta2 = 0.95.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from triaxis.engine.config.quantities.state_plan import StateRow
from triaxis.engine.config.values.optimizer_kinds import EMA, MASTER, StateKind
from triaxis.engine.device.pinned_memory import VectorSize
from triaxis.engine.numerics.precision import STORED_DTYPES, accumulation_dtype

_HALF_BITS = 16


@dataclass(frozen=True, slots=True)
class StoredState:
    """One kind of state in its stored form.

    Each element depends only on the tensors at its index, so any slice can be cut out and widened by itself.

    Attributes:
        tensors: one tensor [n], or two for split masters: the weights and the remainders [n].
        dtype: accumulation dtype, which widened elements have.
    """

    tensors: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, where: slice, /) -> "StoredState":
        return self.over([tensor[where] for tensor in self.tensors])

    def over(self, tensors: Sequence[torch.Tensor]) -> "StoredState":
        """Return a `StoredState` with the same dtype and other tensors, such as clones."""
        return replace(self, tensors=tuple(tensors))

    def widened(self) -> torch.Tensor:
        """Convert the elements [n] to the accumulation dtype; a tensor that already has it is returned itself."""
        if len(self.tensors) == 1:
            return self.tensors[0].to(self.dtype)
        parameters, remainders = self.tensors
        return read_master(parameters, remainders)

    def cpu(self) -> torch.Tensor:
        """Convert the elements [n] to the accumulation dtype, in host memory."""
        return self.over([tensor.cpu() for tensor in self.tensors]).widened()


Allocate = Callable[[Sequence[VectorSize]], Sequence[torch.Tensor]]
"""Function (sizes of vectors) -> vectors with undefined contents."""


class OptimizerState:
    """Master, moments and average for flat `parameters` in the run's dtype.

    Args:
        parameters: view into the flat buffer.
        kept: stored tensor of each kind, on the parameters' device or in host memory. If the master
            has no entry, the parameters are the master.

    Attributes:
        wide: accumulation dtype, used for reads and writes.
    """

    def __init__(self, parameters: torch.Tensor, kept: Mapping[StateKind, torch.Tensor]) -> None:
        self._parameters = parameters
        self.wide = accumulation_dtype(parameters.dtype)
        self._kept: dict[StateKind, torch.Tensor] = {MASTER: parameters, **kept}

    @classmethod
    def initial(
        cls,
        parameters: torch.Tensor,
        kinds: Sequence[StateKind],
        rows: Mapping[StateKind, StateRow],
        allocate: Allocate | None = None,
    ) -> "OptimizerState":
        """Build the state at the start of a run, for parameters that hold their initial values.

        Args:
            kinds: the state's kinds, the master first.
            rows: stored form of each kind (`state_rows`). If the master has no entry, the parameters are the master.
            allocate: source of the tensors; None: the parameters' device.
        """
        dtypes = {kind: STORED_DTYPES[rows[kind].dtype] for kind in kinds if kind in rows}
        sizes = [(parameters.numel(), dtype) for dtype in dtypes.values()]
        if allocate is None:
            tensors = [torch.empty(numel, dtype=dtype, device=parameters.device) for numel, dtype in sizes]
        else:
            tensors = list(allocate(sizes)) if sizes else []
        state = cls(parameters, dict(zip(dtypes, tensors, strict=True)))
        for (kind, dtype), tensor in zip(dtypes.items(), tensors, strict=True):
            tensor.copy_(parameters) if kind == MASTER and dtype == state.wide else tensor.zero_()
        state.restart_average()
        return state

    def piece(self, where: slice, kept: Mapping[StateKind, torch.Tensor]) -> "OptimizerState":
        """Build the state for a slice of this state's parameters, with `kept` as stored tensors."""
        return OptimizerState(self._parameters[where], kept)

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """This part's state kinds, the master first."""
        return tuple(self._kept)

    @property
    def beside(self) -> dict[StateKind, torch.Tensor]:
        """The stored tensors by kind, without the parameters."""
        return {kind: tensor for kind, tensor in self._kept.items() if tensor is not self._parameters}

    def stored(self, kind: StateKind) -> StoredState:
        """Wrap one kind's tensors as `StoredState`, without a copy.

        A split master (`masters: split`) has two: the bf16 parameters and the int16 remainders.
        """
        kept = self._kept[kind]
        is_split = kind == "master" and kept.dtype == torch.int16
        return StoredState((self._parameters, kept) if is_split else (kept,), self.wide)

    def read(self, kind: StateKind) -> torch.Tensor:
        """Return one kind in the accumulation dtype, on the parameters' device. A tensor already like that is not copied."""
        stored = self.stored(kind)
        return stored.over([tensor.to(self._parameters.device) for tensor in stored.tensors]).widened()

    def write(self, values: Mapping[StateKind, torch.Tensor]) -> None:
        """Store values given in the accumulation dtype; writing the master also rounds it into the parameters."""
        for kind, value in values.items():
            kept = self._kept[kind]
            if kind == "master":
                write_master(self._parameters, kept, value)
            elif kept is not value:
                kept.copy_(value)

    def restart_average(self) -> None:
        """Set the moving average, if there is one, to the masters, as at the start of a run."""
        if EMA in self._kept:
            self._kept[EMA].copy_(self.read(MASTER))

    def update_average(self, master: torch.Tensor, decay: float, skip: torch.Tensor) -> None:
        """Move the average towards the updated masters [n]: e <- e + (1 - decay) (w - e).

        Args:
            decay: the `optimizer.ema` decay.
            skip: a bool on the device; True changes no bit.
        """
        average = self._kept[EMA]
        # Three roundings, as in a plain loop and in the compiled update; `lerp` and `add` with a factor may fuse two of them.
        moved = (master - average).mul_(1 - decay).add_(average)
        torch.where(skip, average, moved, out=average)

    def part(self, where: slice) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor], torch.Tensor | None]:
        """Slice the stored tensors; return (parameters, masters, moments, average).

        The masters are None if the parameters are the masters; the average is None if none is kept.
        """
        master, average = self._kept[MASTER], self._kept.get(EMA)
        beside = None if master is self._parameters else master[where]
        moments = [kept[where] for kind, kept in self._kept.items() if kind not in (MASTER, EMA)]
        return self._parameters[where], beside, moments, None if average is None else average[where]


def read_master(parameters: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Compute exact weights from bf16 weights and int16 remainders `kept`. Return `kept` itself if it is not int16."""
    if kept.dtype != torch.int16:
        return kept
    upper = parameters.view(torch.int16).to(torch.int32)
    return (upper << _HALF_BITS).add_(kept).view(accumulation_dtype(parameters.dtype))


def write_master(parameters: torch.Tensor, kept: torch.Tensor, value: torch.Tensor) -> None:
    """Store the exact weights `value` in `kept`, and round them into `parameters`.

    If `kept` is int16 (`masters: split`), it gets only the remainders that the rounding leaves.
    """
    if kept.dtype == torch.int16:
        # Adding half a unit of the upper half before the lower half is cut off rounds ties away from zero.
        bits = value.view(torch.int32)
        upper = (bits + (1 << (_HALF_BITS - 1))) >> _HALF_BITS
        parameters.view(torch.int16).copy_(upper)
        kept.copy_(bits - (upper << _HALF_BITS))
        return
    if kept is not value:
        kept.copy_(value)
    if kept is not parameters:
        parameters.copy_(kept)
