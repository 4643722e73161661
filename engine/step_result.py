"""The numbers of a step: on their way to the host, read, and what they say of a step that updated nothing."""

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from triaxis.engine.comm.agreement import NO_FLAGS, NUM_FLAGS, StepFlags
from triaxis.engine.comm.stop import StopRequest
from triaxis.engine.config.mtp import MTPConfig
from triaxis.engine.device.host_copy import HostCopy, ToHost
from triaxis.engine.errors import DivergenceError
from triaxis.engine.step_limits import NO_LIMITS, StepLimits


class BatchLosses(NamedTuple):
    """The losses of one global batch, in float64 on the device, and their divisors:

        loss = L0 / n0  +  loss_weight / D x (L1 / n1 + .. LD / nD)  +  losses of routers / nominal tokens

    Lk is the sum of the losses of the counted labels at distance k (`engine/config/mtp.py`). Their number is nk (s - k) / s: of the
    s labels of a row s - k can count. Without a mask each nk is the number of nominal tokens (2412.19437, equation 24). A router
    chooses for every token, counted or not, so its losses are over the nominal tokens (`engine/expert_parallel/routing.py`).

    Attributes:
        sums: [1 + D], L0 of this rank, then the others with their weight; zeros off the last stage.
        labels: [1 + D], the numbers of counted labels of the global batch.
    """

    sums: torch.Tensor
    labels: torch.Tensor


def loss_divisors(num_labels: torch.Tensor, seq_length: int) -> torch.Tensor:
    """Return n [1 + D] of `BatchLosses` from the numbers of counted labels; 1 where no label is counted."""
    in_a_row = torch.arange(
        seq_length, seq_length - len(num_labels), -1, dtype=num_labels.dtype, device=num_labels.device
    )
    return (num_labels * seq_length / in_a_row).clamp(min=1.0)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The numbers of a step, the same on all ranks.

    Attributes:
        loss: per token, in nats.
        grad_norm: global, before clipping, without the loss scale.
        num_tokens: counted labels of the global batch. Without any, the step has updated nothing.
        flags: how many ranks raised each flag.
        flaw: why the step has updated nothing; "": it has, or it left its update out as below or for want of a counted label.
        load: tokens of the global batch that chose each expert, by layer with experts; (): the model has none.
        dropped: rows of tokens that found no room in the buffers of their experts; a step with any has a flaw.
        ahead: loss per token of multi-token prediction, at each distance beyond the next token.
        loss_scale: of its backward; None where the dtype needs none.
        outlier: why it has updated nothing though its numbers are finite: they are above the limits of `StepLimits`; "": they are
            not.
        has_overflowed: its gradients did not fit in fp16 at this scale, so it has updated nothing. The scale may have fallen since.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    flags: StepFlags = NO_FLAGS
    flaw: str = ""
    load: tuple[tuple[int, ...], ...] = ()
    dropped: int = 0
    ahead: tuple[float, ...] = ()
    loss_scale: float | None = None
    has_overflowed: bool = False
    outlier: str = ""


class PendingResult:
    """A step that is posted, its numbers on their way to the host.

    Args:
        numbers: [loss, gradient norm, tokens, loss sum, sum of squares, rows without room, whether the step diverged,
            loss scale, whether gradients overflowed, whether the step is an outlier, *`StepFlags.values`, *the loss of each token
            ahead, *the load of experts by layer].
        limits: what the numbers may be at most.
        num_experts: of a layer; 0: the model has none.
        num_ahead: tokens ahead; 0: the model predicts none.
        is_scaled: the run is one in fp16.
        to_host: copies the numbers; None: the device's way.
    """

    def __init__(
        self,
        numbers: torch.Tensor,
        limits: StepLimits = NO_LIMITS,
        to_host: ToHost | None = None,
        num_experts: int = 0,
        num_ahead: int = 0,
        is_scaled: bool = False,
    ) -> None:
        self._numbers = HostCopy(numbers, to_host)
        self._limits = limits
        self._num_experts, self._num_ahead = num_experts, num_ahead
        self._is_scaled = is_scaled

    def read(self) -> StepResult:
        """Read what all ranks agree on; `flaw` says why nothing was updated, if so."""
        loss, grad_norm, num_tokens, loss_sum, square_sum, overflow, diverged, *others = self._numbers.wait()
        loss_scale, has_overflowed, is_outlier, *others = others
        flags, ahead = others[:NUM_FLAGS], tuple(others[NUM_FLAGS : NUM_FLAGS + self._num_ahead])
        load = [int(count) for count in others[NUM_FLAGS + self._num_ahead :]]
        by_layer = tuple(tuple(load[at : at + self._num_experts]) for at in range(0, len(load), self._num_experts or 1))
        flaw = ""
        if overflow:
            flaw = without_room(int(overflow))
        elif diverged:
            flaw = f"loss sum {loss_sum} and squared gradient norm {square_sum} over {int(num_tokens)} tokens "
            if not (math.isfinite(loss_sum) and math.isfinite(square_sum)):
                flaw += "are not finite"
                if self._is_scaled and math.isfinite(loss_sum):
                    flaw += f", at a loss scale of {loss_scale:g}, which may not fall further (precision.loss_scale)"
            elif loss > self._limits.divergence:
                flaw = (
                    f"loss {loss:.4f} over {int(num_tokens)} tokens is above the limit of {self._limits.divergence:.4f}"
                )
            else:
                flaw += "are finite, but those of a step before were not"
        return StepResult(
            loss,
            grad_norm,
            int(num_tokens),
            StepFlags.of(flags),
            flaw,
            by_layer,
            int(overflow),
            ahead,
            loss_scale if self._is_scaled else None,
            bool(has_overflowed),
            self._outlier(loss, grad_norm) if is_outlier else "",
        )

    def _outlier(self, loss: float, grad_norm: float) -> str:
        """Return which numbers of a step are above their limits, and by which rule."""
        compared = (("loss", loss, self._limits.loss), ("gradient norm", grad_norm, self._limits.grad_norm))
        above = " and ".join(
            f"{name} {number:.4f} is above {most:.4f}" for name, number, most in compared if number > most
        )
        return f"{above}, the mean of the last steps and resilience.skip_above_deviations standard deviations"

    def wait(self) -> StepResult:
        """Read the result of a step that must have updated the weights, but for an overflow of fp16 or an outlier.

        Raises:
            DivergenceError: the loss or the gradient norm of this step or of one before it was not finite; on every rank. No
                weight has changed since.
        """
        result = self.read()
        if result.flaw:
            raise DivergenceError(explain(result))
        return result


class RollbackRequested(Exception):  # noqa: N818 - a decision, no error
    """The request to go back to before step number `step` (from 0); on every rank at once.

    Attributes:
        samples: the range [first, stop) of sample ids that are left out from then on.
        why: the text of the error, for a run that may not go back again.
    """

    def __init__(self, step: int, samples: tuple[int, int], why: str) -> None:
        super().__init__(why)
        self.step = step
        self.samples = samples
        self.why = why


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step whose numbers are on the host.

    Attributes:
        step: its number, from 0.
        lr: the learning rate of its update.
        result: the same on every rank.
    """

    step: int
    lr: float
    result: StepResult


class StepsInFlight:
    """Steps that are posted and not read, in order; a step is read when the next one is posted, so a GPU always has work."""

    def __init__(self) -> None:
        self._posted: deque[tuple[int, float, PendingResult]] = deque()

    def post(self, step: int, lr: float, result: PendingResult) -> None:
        self._posted.append((step, lr, result))

    def read(self, stop: StopRequest, *, newest: bool) -> list[FinishedStep]:
        """Read every step but the newest, and that one too if `newest`, or if a step before it carries an agreed stop.

        Every rank reads the same steps here, because the sums of a step are the same on all of them.
        """
        finished = []
        while len(self._posted) > 1 or (self._posted and (newest or stop.agreed is not None)):
            step, lr, pending = self._posted.popleft()
            result = pending.read()
            stop.decide(result.flags.stop)
            finished.append(FinishedStep(step, lr, result))
        return finished


def losses_ahead(sums: torch.Tensor, divisors: torch.Tensor, mtp: MTPConfig | None) -> torch.Tensor:
    """Return the loss per token [D] of multi-token prediction, from the weighted loss sums [D] and the numbers of labels [D]."""
    return sums if mtp is None else sums * (mtp.num_layers / mtp.loss_weight) / divisors


def without_room(rows: int) -> str:
    """Return the flaw of a step in which experts' buffers were too small."""
    return (
        f"{rows:,} rows of tokens found no room in the buffers of their experts: without them the step would train another model. "
        "Raise model.moe.row_headroom (null: room for the worst case), or take kernels.dispatch=all_to_all"
    )


def explain(result: StepResult) -> str:
    """Explain a step that updated nothing, and say what can be done."""
    if result.dropped:
        return f"{result.flaw}. Nothing was changed on any rank."
    return (
        f"{result.flaw}: an update would destroy the weights. Nothing was changed on any rank. Lower optimizer.lr, lengthen the "
        "warm-up, or look at the data of the step."
    )
