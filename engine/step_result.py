"""Packs a step's numbers, reads them on the host, and explains skipped updates."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from triaxis.engine.comm.agreement import NO_FLAGS, StepFlags
from triaxis.engine.config.schema.mtp import MTPConfig
from triaxis.engine.device.host_copy import HostCopy
from triaxis.engine.errors import DivergenceError
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE
from triaxis.engine.step_limits import NO_LIMITS, StepLimits

Skip = Literal["", "outlier", "no_labels", "overflowed", "diverged"]
"""Reason why a step updated nothing; "" if it did update. If several apply, the last one in this list counts.

outlier       its numbers are finite, but above the limits in `StepLimits`
no_labels     no label in the global batch is counted
overflowed    its gradients did not fit in fp16 at its loss scale, which may have fallen since
diverged      this step, or an earlier one, had a loss or gradients that were not finite, a loss above the limit, or token rows
              that found no room
"""

SKIPS: tuple[Skip, ...] = get_args(Skip)


def skip_code(*reasons: torch.Tensor) -> torch.Tensor:
    """Compute the index in `SKIPS` of the last reason that applies.

    Index 0 means no reason.

    Args:
        reasons: bool scalars on the device, one for each of `SKIPS[1:]`.
    """
    return torch.stack([reason * place for place, reason in enumerate(reasons, start=1)]).amax()


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Pack tensors with any shape and dtype into one float64 vector."""
    return torch.cat([each.flatten().to(AGREEMENT_DTYPE) for each in tensors])


def unpack(vector: torch.Tensor, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split a packed vector into parts with the names and shapes in `like`. The parts stay float64."""
    parts = vector.split([each.numel() for each in like.values()])
    return {name: part.view(each.shape) for (name, each), part in zip(like.items(), parts, strict=True)}


class BatchLosses(NamedTuple):
    """Losses of one global batch, with the label counts that give their divisors.

        loss = L0 / n0  +  loss_weight / D x (L1 / n1 + .. LD / nD)  +  losses of routers / nominal tokens

    D is the number of multi-token prediction layers (`engine/config/schema/mtp.py`), s the sequence length. Lk is the loss summed
    over the counted labels k tokens beyond the next one. Only s - k labels of a row can count for Lk. So the divisor nk is the
    number of counted labels times s / (s - k). Without masked labels, every nk is the nominal token count, batch size x s
    (2412.19437, equation 24). A router chooses for every token, counted or not, so its loss is divided by the nominal token count.

    Attributes:
        sums: [L0, L1 x loss_weight / D, .., LD x loss_weight / D] of this rank, in float64 on the device. Zeros except on the last
            stage's tp rank 0.
        labels: number of counted labels in the global batch for each of L0 .. LD, [1 + D].
    """

    sums: torch.Tensor
    labels: torch.Tensor


LEAST_LABELS = 1e-6
"""Divisor for a loss without counted labels: far below one label, since a loss may weight its labels."""


def loss_divisors(num_labels: torch.Tensor, seq_length: int) -> torch.Tensor:
    """Compute each loss's divisor, [1 + D], from its number of counted labels.

    Divisor k is for labels k tokens beyond the next one (see `BatchLosses`). Each divisor is at least `LEAST_LABELS`.
    """
    in_a_row = torch.arange(
        seq_length, seq_length - len(num_labels), -1, dtype=num_labels.dtype, device=num_labels.device
    )
    return (num_labels * seq_length / in_a_row).clamp(min=LEAST_LABELS)


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's numbers, the same on all ranks.

    Attributes:
        loss: loss per token, in nats.
        grad_norm: global gradient norm, before clipping, without the loss scale.
        num_tokens: number of counted labels in the global batch, or the sum of their weights.
        flags: number of ranks that raised each flag.
        skip: reason why the step updated nothing; "" if it did update.
        why: explanation of `skip` with its numbers; "" for an update, an fp16 overflow or a batch without labels.
        load: number of tokens in the global batch that chose each expert, a tuple per layer with experts; () without experts.
        dropped: number of token rows without room in their experts' buffers; if above 0, `skip` is "diverged".
        ahead: multi-token-prediction loss per token, at each distance beyond the next token.
        loss_scale: loss scale in the backward; None if the dtype needs none.
    """

    loss: float
    grad_norm: float
    num_tokens: float
    flags: StepFlags = NO_FLAGS
    skip: Skip = ""
    why: str = ""
    load: tuple[tuple[int, ...], ...] = ()
    dropped: int = 0
    ahead: tuple[float, ...] = ()
    loss_scale: float | None = None


def _plain(number: float) -> float:
    """Convert a float without a fraction to int, so that it prints as a count. Others are returned unchanged."""
    return int(number) if number.is_integer() else number


class PendingResult:
    """Posted step whose numbers are on their way to the host.

    Args:
        numbers: numbers on the device, by name (`triaxis.engine.step.Engine.update` has the list).
        limits: limits that `update` applied; `StepResult.why` names those that were exceeded.
        packing: `pack`, or its compiled form.
    """

    def __init__(
        self,
        numbers: Mapping[str, torch.Tensor],
        limits: StepLimits = NO_LIMITS,
        packing: Callable[[Sequence[torch.Tensor]], torch.Tensor] = pack,
    ) -> None:
        self._numbers = numbers
        self._vector = HostCopy(packing([*numbers.values()]))
        self._limits = limits

    def read(self) -> StepResult:
        """Wait until the step's numbers are on the host, and build its result. All ranks get the same."""
        numbers: dict[str, Any] = {
            name: part.tolist() for name, part in unpack(self._vector.arrived(), self._numbers).items()
        }
        skip = SKIPS[int(numbers["skip"])]
        return StepResult(
            numbers["loss"],
            numbers["grad_norm"],
            _plain(numbers["num_tokens"]),
            StepFlags.of(numbers["flags"]),
            skip,
            self._why(skip, numbers),
            tuple(tuple(map(int, layer)) for layer in numbers.get("load", ())),
            int(numbers["dropped"]),
            tuple(numbers["ahead"]),
            numbers.get("loss_scale"),
        )

    def _why(self, skip: Skip, numbers: Mapping[str, Any]) -> str:
        """Explain why a step is an outlier or has diverged, with its numbers and the exceeded limits. "" for any other `skip`."""
        limits, loss, grad_norm = self._limits, numbers["loss"], numbers["grad_norm"]
        if skip == "outlier":
            compared = (("loss", loss, limits.loss), ("gradient norm", grad_norm, limits.grad_norm))
            above = " and ".join(
                f"{name} {each:.4f} is above {most:.4f}" for name, each, most in compared if each > most
            )
            return f"{above}, the mean of the last steps and resilience.skip_above_deviations standard deviations"
        if skip != "diverged":
            return ""
        if numbers["dropped"]:
            return without_room(int(numbers["dropped"]))
        loss_sum, square_sum, tokens = numbers["loss_sum"], numbers["square_sum"], numbers["num_tokens"]
        sums = f"loss sum {loss_sum} and squared gradient norm {square_sum} over {tokens:g} tokens are"
        if not (math.isfinite(loss_sum) and math.isfinite(square_sum)):
            scale = numbers.get("loss_scale") if math.isfinite(loss_sum) else None
            at = (
                ""
                if scale is None
                else f", at a loss scale of {scale:g}, which may not fall further (precision.loss_scale)"
            )
            return f"{sums} not finite{at}"
        if loss > limits.divergence:
            return f"loss {loss:.4f} over {tokens:g} tokens is above the limit of {limits.divergence:.4f}"
        return f"{sums} finite, but those of a step before were not"

    def wait(self) -> StepResult:
        """Read the step's result, and raise an error if the step diverged.

        Raises:
            DivergenceError: this step or an earlier one has diverged; raised on every rank. No weight has changed since.
        """
        result = self.read()
        if result.skip == "diverged":
            raise DivergenceError(explain(result))
        return result


def losses_ahead(sums: torch.Tensor, labels: torch.Tensor, mtp: MTPConfig | None) -> torch.Tensor:
    """Compute the multi-token-prediction loss per token, [D].

    Args:
        sums: L1 .. LD, each times loss_weight / D (`BatchLosses`).
        labels: numbers of counted labels for L1 .. LD (not n1 .. nD).
        mtp: multi-token prediction settings; None: `sums` is empty and is returned.
    """
    return sums if mtp is None else sums * (mtp.num_layers / mtp.loss_weight) / labels.clamp(min=LEAST_LABELS)


def without_room(rows: int) -> str:
    """Build the message for a step in which experts' buffers were too small."""
    return (
        f"{rows:,} rows of tokens found no room in the buffers of their experts: without them the step would train another model. "
        "Raise model.moe.row_headroom (null: room for the worst case), or take kernels.dispatch=all_to_all"
    )


def explain(result: StepResult) -> str:
    """Build the error message for a diverged step, with advice on how to continue."""
    if result.dropped:
        return f"{result.why}. Nothing was changed on any rank."
    return (
        f"{result.why}: an update would destroy the weights. Nothing was changed on any rank. Lower optimizer.lr, lengthen the "
        "warm-up, or look at the data of the step."
    )
