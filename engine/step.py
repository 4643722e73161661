"""One optimizer step, and one validation: forward and backward over all microbatches, reduction, clipping, update.

    executor    runs the schedule; gradients go to main grads, buckets are reduced as they fill
    finish      the owned parts hold whole gradients, scaled by 1 / nominal tokens
    agree       one small all-reduce over the world: [sum of squares, loss sum, tokens, flags of a save, flags of a stop,
                whether the allocator retried]
    optimizer   gradients x (nominal / actual tokens) x clip factor; AdamW on the owned parts; all-gathers posted
    read        loss, norm and flags on the host, when they are waited for (by the loop, a step later)

Nothing before `read` brings a number to the host: norm, clipping and the decision not to update are made on the device, so
that it is never idle while the host reads. From a step on whose loss or gradients are not finite, nothing is updated (with
`resilience.on_nonfinite: skip`, in that step alone).

The loss is the sum of token losses over the unmasked tokens of the GLOBAL batch. The backward scales by the constant
1 / nominal tokens (global batch x sequence length), so that no rank needs to know the others' masks; what masks
take away is put right by one factor at the end, exactly 1.0 where nothing is masked.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from engine.activations.saved_tensors import SavedTensors
from engine.comm.agreement import NO_FLAGS, NUM_SUMS, StepFlags, StopFlags
from engine.comm.stop import StopRequest
from engine.comm.topology import Topology
from engine.config.activations import RecomputeConfig
from engine.config.plan import BatchPlan
from engine.config.tree import Config
from engine.device.host_copy import HostCopy, ToHost, to_device
from engine.errors import DivergenceError
from engine.kernels.registry import Kernels
from engine.layout.partition import StageLayers
from engine.numerics.precision import AGREEMENT_DTYPE
from engine.optimizer.clip import clip_factor
from engine.optimizer.distributed import DistributedOptimizer
from engine.optimizer.grad_buffer import GradBuffers
from engine.pipeline.actions import Schedule
from engine.pipeline.executor import Executor, InstructionObserver
from engine.pipeline.programs import Programs
from engine.tensor_parallel.parameter import ShardedParameter
from engine.tensor_parallel.weight_grads import WeightGradQueue


class Chunk(Protocol):
    """An `nn.Module` as the engine uses it: one chunk of the model."""

    @property
    def queue(self) -> WeightGradQueue: ...
    @property
    def saved(self) -> SavedTensors: ...
    @property
    def recompute(self) -> RecomputeConfig: ...
    def __call__(self, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor: ...
    def logits(self, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor: ...
    def train(self, mode: bool = True) -> nn.Module: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """The numbers of a step, the same on all ranks.

    Attributes:
        loss: per token, in nats.
        grad_norm: global, before clipping.
        num_tokens: counted tokens of the global batch.
        flags: how many ranks raised each flag.
        flaw: why the step has updated nothing; "": it has.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    flags: StepFlags = NO_FLAGS
    flaw: str = ""


class PendingResult:
    """A step that is posted, its numbers on their way to the host.

    Args:
        numbers: [loss, gradient norm, tokens, loss sum, sum of squares, whether the update was left out, *`StepFlags.values`].
        loss_limit: what the loss may be at most.
        to_host: copies the numbers; None: the device's way.
    """

    def __init__(self, numbers: torch.Tensor, loss_limit: float = math.inf, to_host: ToHost | None = None) -> None:
        self._numbers = HostCopy(numbers, to_host)
        self._loss_limit = loss_limit

    def read(self) -> StepResult:
        """Read what all ranks agree on; `flaw` says why nothing was updated, if so."""
        loss, grad_norm, num_tokens, loss_sum, square_sum, left_out, *flags = self._numbers.wait()
        flaw = ""
        if left_out:
            flaw = f"loss sum {loss_sum} and squared gradient norm {square_sum} over {int(num_tokens)} tokens "
            if not (math.isfinite(loss_sum) and math.isfinite(square_sum)):
                flaw += "are not finite"
            elif loss > self._loss_limit:
                flaw = f"loss {loss:.4f} over {int(num_tokens)} tokens is above the limit of {self._loss_limit:.4f}"
            else:
                flaw += "are finite, but those of a step before were not"
        return StepResult(loss, grad_norm, int(num_tokens), StepFlags.of(flags), flaw)

    def wait(self) -> StepResult:
        """Read the result of a step that must have updated the weights.

        Raises:
            DivergenceError: the loss or the gradient norm of this step or of one before it was not finite; on every rank. No
                weight has changed since.
        """
        result = self.read()
        if result.flaw:
            raise DivergenceError(explain(result.flaw))
        return result


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


def explain(flaw: str) -> str:
    """Explain a step that updated nothing, and say what can be done."""
    return (
        f"{flaw}: an update would destroy the weights. Nothing was changed on any rank. Lower optimizer.lr, lengthen the warm-up, "
        "or look at the data of the step."
    )


@dataclass
class Engine:
    """One rank's assembled engine (see `engine.train.build`).

    Attributes:
        stages: what each pipeline stage of the model holds, in stage order.
        parameters: by global name, in forward order.
        train_programs, forward_programs: the lowered schedules of a training step and of a forward-only step.
        count_retries: returns how often this rank's allocator has had to free memory and ask again.
        diverged: a bool on the device: loss or gradients were not finite, or the loss above its limit, so nothing is updated in
            this step (`resilience.on_nonfinite: skip`) or any more (else).
        to_host: copies the numbers of a step to the host; None: the device's way.
    """

    config: Config
    topology: Topology
    kernels: Kernels
    plan: BatchPlan
    stages: Sequence[StageLayers]
    chunks: Sequence[Chunk]
    parameters: dict[str, ShardedParameter]
    buffers: GradBuffers
    optimizer: DistributedOptimizer
    executor: Executor
    train_programs: Programs
    forward_programs: Programs
    count_retries: Callable[[], int]
    diverged: torch.Tensor = field(init=False)
    to_host: ToHost | None = None

    def __post_init__(self) -> None:
        self.diverged = torch.zeros((), dtype=torch.bool, device=self.topology.device)
        self._retries = self.count_retries()

    @property
    def schedule(self) -> Schedule:
        """Return the compute actions of a training step, of all pipeline ranks."""
        return self.train_programs.schedule

    @property
    def recompute(self) -> RecomputeConfig:
        """Return the choice that `config.recompute` came to; all chunks have the same, without an `auto`."""
        return self.chunks[0].recompute

    @property
    def nominal_tokens(self) -> int:
        return self.plan.tokens_per_step

    def forward_backward(
        self,
        microbatches: Sequence[Any],
        observers: Sequence[InstructionObserver] = (),
        on_grad: Callable[[ShardedParameter], None] | None = None,
    ) -> torch.Tensor:
        """Compute and reduce the gradients of one global batch.

        Args:
            observers: of the instructions of this step alone (`engine.pipeline.executor.Executor`).
            on_grad: called with each parameter whose gradient was added (`engine.optimizer.grad_buffer.GradBuffers.start`).

        Returns:
            This rank's [loss sum, tokens]; zeros off the last stage.
        """
        self.topology.ledger.reset()
        for chunk in self.chunks:
            chunk.train(True)
        self.buffers.start(self.plan.num_microbatches, on_grad)
        program = self.train_programs.next()
        scale = 1.0 / self.nominal_tokens
        losses = self.executor.run(program, microbatches, self._loss, loss_scale=scale, observers=observers)
        counts = self._count(losses, microbatches)
        self.buffers.finish()
        return counts

    def train_step(self, microbatches: Sequence[Any], lr: float) -> StepResult:
        """Run `forward_backward`, then `update`, and wait for the result."""
        return self.update(self.forward_backward(microbatches), lr).wait()

    def update(
        self,
        counts: torch.Tensor,
        lr: float,
        flags: StepFlags = NO_FLAGS,
        loss_limit: float = math.inf,
    ) -> PendingResult:
        """Post one update of the weights with the reduced gradients; `counts` are this rank's.

        A loss above `loss_limit` is treated as one that is not finite: nothing is updated.
        `flags` of a save and of a stop are summed over the ranks in the same small all-reduce (`engine.comm.agreement`), and so is
        whether this rank's allocator has retried.
        """
        before, self._retries = self._retries, self.count_retries()
        raised = flags._replace(retried=float(self._retries > before)).values()
        mine = [self.optimizer.grad_square_sum().to(AGREEMENT_DTYPE).view(1), counts]
        vector = torch.cat((*mine, counts.new_zeros(len(raised))))
        for place, flag in enumerate(raised, start=NUM_SUMS):
            if flag:
                vector[place].fill_(flag)
        agreed = self.topology.axis("world").all_reduce(vector, "step").wait()

        square_sum, loss_sum, num_tokens = agreed[:NUM_SUMS].unbind()
        # A global batch without a single counted token has no gradient; its loss is reported as zero.
        tokens = num_tokens.clamp(min=1.0)
        scale = self.nominal_tokens / tokens
        grad_norm = square_sum.sqrt() * scale
        is_bad = agreed[:2].isfinite().all().logical_not() | (loss_sum / tokens > loss_limit)
        self.diverged = is_bad if self.config.resilience.on_nonfinite == "skip" else self.diverged | is_bad
        clipped = clip_factor(grad_norm, self.config.optimizer.clip_grad)
        self.optimizer.step(lr, scale if clipped is None else scale * clipped, skip=self.diverged)
        sums = torch.stack((loss_sum / tokens, grad_norm, num_tokens, loss_sum, square_sum, self.diverged))
        return PendingResult(torch.cat((sums, agreed[NUM_SUMS:])), loss_limit, self.to_host)

    def receive_late(self) -> bool:
        """Use late receives in the next runs; whether the runs before had early ones. Every rank calls it after the same step."""
        was_early = not self.train_programs.is_late
        self.train_programs.receive_late()
        self.forward_programs.receive_late()
        return was_early

    def evaluate(self, steps: Iterable[Sequence[Any]]) -> float:
        """Return the loss per token over some global batches, without dropout; the same on every rank."""
        counts = torch.zeros(2, dtype=AGREEMENT_DTYPE, device=self.topology.device)
        for chunk in self.chunks:
            chunk.train(False)
        for microbatches in steps:
            losses = self.executor.run(self.forward_programs.next(), microbatches, self._loss)
            counts += self._count(losses, microbatches)
        loss_sum, total = self.topology.axis("world").all_reduce(counts, "validation").wait().tolist()
        return float(loss_sum) / max(float(total), 1.0)

    def post_stop(self, flags: StopFlags) -> Callable[[], list[float]]:
        """Post the sum of this rank's stop flags over the world, outside a step; every rank calls it.

        Returns:
            A function that waits for the sums and returns them. It is called once, in the order of the posts.
        """
        vector = to_device(flags, AGREEMENT_DTYPE, self.topology.device)
        posted = self.topology.axis("world").all_reduce(vector, "validation")
        return lambda: [float(total) for total in posted.wait().tolist()]

    def _loss(self, chunk: int, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        return self.chunks[chunk](x, microbatch)

    def _count(self, losses: Sequence[torch.Tensor], microbatches: Sequence[Any]) -> torch.Tensor:
        """Return [loss sum, tokens] on the device, counted once per model replica: by the tp rank 0 of the last stage."""
        if not losses or self.topology.coordinates.tp != 0:
            return torch.zeros(2, dtype=AGREEMENT_DTYPE, device=self.topology.device)
        loss_sum = torch.stack(list(losses)).sum().to(AGREEMENT_DTYPE)
        num_tokens = sum(microbatch.num_tokens for microbatch in microbatches)
        return torch.stack((loss_sum, torch.full_like(loss_sum, num_tokens)))
