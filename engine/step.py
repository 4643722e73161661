"""Runs one rank's part of a training step or a validation.

    labels      one small all-reduce over the world sums the counted labels; the training loop posts it a step ahead
    executor    runs the schedule, adds gradients to main grads, and posts reductions of full buckets
    finish      waits for the reductions; this rank's bucket parts then hold whole gradients
    agree       small all-reduces over the world sum losses, squared gradients, flags and expert load
    optimizer   divides gradients by the loss scale, clips them, updates the owned parts, and posts all-gathers
    balance     moves the routers' biases towards an even load
    read        brings the step's numbers to the host, a step later

No number reaches the host before `read`. Norm, clipping and the decision to skip are computed on the device. So the device is never
idle while the host reads.

A step diverges if its loss is not finite or above the limit, if token rows find no room, or if its gradients are not
finite and the loss scale cannot fall. That step and all later ones update nothing. With
`resilience.on_nonfinite: skip`, only the bad step is skipped. If gradients are not finite but the
scale can still fall, only their own step is skipped. `Skip` (`engine/step_result.py`) lists all reasons why a step
updates nothing.

The loss is summed over all unmasked tokens in the GLOBAL batch and divided by their number. That number is known before the
backward.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from triaxis.engine.activations.saved_tensors import SavedTensors
from triaxis.engine.comm.agreement import NO_FLAGS, StepFlags, StopFlags
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.ledger import LABELS
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import BatchPlan
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import count_labels
from triaxis.engine.device.host_copy import to_device
from triaxis.engine.errors import DivergenceError
from triaxis.engine.expert_parallel.balance import ExpertLoad
from triaxis.engine.kernels.registry import Kernels
from triaxis.engine.layout.partition import StageLayers
from triaxis.engine.linear.weight_grads import WeightGradQueue
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE
from triaxis.engine.optimizer.distributed import DistributedOptimizer, clip_factor
from triaxis.engine.optimizer.grad_buffer import GradBuffers
from triaxis.engine.optimizer.loss_scale import LossScale
from triaxis.engine.pipeline.actions import Schedule
from triaxis.engine.pipeline.executor import Executor, InstructionObserver
from triaxis.engine.pipeline.programs import Programs
from triaxis.engine.step_limits import NO_LIMITS, StepLimits
from triaxis.engine.step_result import (
    LEAST_LABELS,
    SKIPS,
    BatchLosses,
    PendingResult,
    StepResult,
    loss_divisors,
    losses_ahead,
    pack,
    skip_code,
    unpack,
    without_room,
)
from triaxis.engine.tensor_parallel.parameter import ShardedParameter


class Chunk(Protocol):
    """The engine's view of a model chunk, which is an `nn.Module`.

    `x` is the previous stage's output, None on the first stage. The last stage returns the summed loss, a scalar. In training with
    D multi-token prediction layers, it returns [1 + D] sums.
    """

    @property
    def queue(self) -> WeightGradQueue: ...
    @property
    def saved(self) -> SavedTensors: ...
    @property
    def load(self) -> ExpertLoad | None: ...
    @property
    def output_grad(self) -> torch.Tensor | None: ...
    @property
    def training(self) -> bool: ...
    def __call__(self, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor: ...
    def logits(self, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor: ...
    def train(self, mode: bool = True) -> nn.Module: ...


@dataclass
class Engine:
    """One rank's assembled engine (see `triaxis.engine.train.build`).

    A step is two calls, `forward_backward` and `update`. Between them, meters can read whole gradients and the weights that
    produced them. `update` posts the same collectives on every rank, whatever the numbers are. So every decision is a tensor on the
    device, never a host branch. The loop, not the engine, decides when to validate, save, stop or roll back.

    Attributes:
        config: the run's resolved configuration; no field of its `recompute` section is `auto`.
        stages: layers and ends (embedding, head) in each pipeline stage, in stage order.
        parameters: this rank's parameters by global name, in forward order.
        train_programs, forward_programs: lowered schedules for a training step and for a forward-only step.
        count_retries: function () -> how often this rank's allocator had to free memory and retry.
        diverged: bool scalar on the device: whether a step has diverged (`Skip`). While it is True, no step updates anything. With
            `resilience.on_nonfinite: skip`, each step sets it anew.
        loss_scale: loss scale for the next backward.
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
    loss_scale: LossScale = field(init=False)

    def __post_init__(self) -> None:
        self.diverged = torch.zeros((), dtype=torch.bool, device=self.topology.device)
        self.loss_scale = LossScale(self.config.precision.scaling, self.topology.device)
        self._world = self.topology.axis("world")
        self._retries = self.count_retries()
        self._no_limits = torch.tensor(NO_LIMITS, dtype=AGREEMENT_DTYPE, device=self.topology.device)
        self._pack, self._decide = self.kernels.fusion(pack), self.kernels.fusion(_decide)

    @property
    def schedule(self) -> Schedule:
        """Schedule for a training step: the compute actions on all pipeline ranks."""
        return self.train_programs.schedule

    @property
    def load(self) -> ExpertLoad | None:
        """Expert load on this rank, shared by all chunks; None without experts."""
        return self.chunks[0].load

    def post_labels(self, num_labels: Sequence[float]) -> Pending:
        """Post the all-reduce that sums `num_labels` over the world.

        Every rank must call this method, and pass the result to `forward_backward`.

        Args:
            num_labels: this rank's numbers from `count_labels`.
        """
        vector = to_device(num_labels, AGREEMENT_DTYPE, self.topology.device)
        return self._world.all_reduce(vector, LABELS)

    def forward_backward(
        self,
        microbatches: Sequence[Any],
        observers: Sequence[InstructionObserver] = (),
        on_grad: Callable[[ShardedParameter], None] | None = None,
        labels: Pending | None = None,
    ) -> BatchLosses:
        """Compute and reduce the gradients for one global batch, and return its losses.

        The ledger, which records communication calls, is emptied first.

        Args:
            microbatches: this rank's part of the batch.
            observers: instruction observers for this step (`triaxis.engine.pipeline.executor.Executor`).
            on_grad: function (parameter) that is called after each addition to the parameter's main grad, before the bucket is
                reduced.
            labels: result of `post_labels` for these microbatches; None: their labels are counted and posted now.
        """
        self.topology.ledger.reset()
        self._set_mode(training=True)
        # Router losses join the backward inside the model, where `output_grad` does not scale them.
        if self.load is not None:
            self.load.begin()
            self.load.loss_scale.copy_(self.loss_scale.scale)
        self.buffers.start(self.plan.num_microbatches, on_grad)
        labels = labels or self.post_labels(count_labels(microbatches))
        # All tensor- and pipeline-parallel ranks in a replica have the same labels.
        num_labels = labels.wait() / (self.topology.sizes.tp * self.topology.sizes.pp)
        program = self.train_programs.next()
        # [1 + D], the gradient for the last stage's output. It includes the divisors, so main grads need no extra division pass.
        output_grad = self.loss_scale.scale / loss_divisors(num_labels, self.config.model.seq_length)
        if (of_forward := self.chunks[0].output_grad) is not None:
            of_forward.copy_(output_grad)
        losses = self.executor.run(program, microbatches, self._loss, output_grad=output_grad, observers=observers)
        self.buffers.finish()
        return BatchLosses(self._sums(losses, len(num_labels)), num_labels)

    def _set_mode(self, *, training: bool) -> None:
        # Torch sets the mode module by module in Python, which would slow down a step with small microbatches.
        for chunk in self.chunks:
            if chunk.training != training:
                chunk.train(training)

    def train_step(self, microbatches: Sequence[Any], lr: float) -> StepResult:
        """Run `forward_backward` and `update`, and wait for the result. DivergenceError if the step diverged."""
        return self.update(self.forward_backward(microbatches), lr).wait()

    def update(
        self,
        losses: BatchLosses,
        lr: float,
        flags: StepFlags = NO_FLAGS,
        limits: StepLimits = NO_LIMITS,
    ) -> PendingResult:
        """Post one weight update with the reduced gradients.

        A batch without a counted label changes nothing: neither weights, moments, weight average nor router biases. A loss above
        `limits.divergence` counts as not finite. A finite loss or gradient norm above another limit skips this update and leaves
        the loss scale unchanged.

        Args:
            losses: losses of the batch that produced the gradients.
            flags: this rank's save and stop flags, which are summed over all ranks; `retried` is set here.
        """
        before, self._retries = self._retries, self.count_retries()
        raised = flags._replace(retried=float(self._retries > before)).values()
        # These gradients' scale; `loss_scale.update` below replaces it with the next step's.
        load, used = self.load, self.loss_scale.scale
        # Posted first and waited for last, since only router biases need the counts.
        posted = None if load is None else load.post(self._world)
        # The vector to sum. All ranks have these names in this order, with zeros for sums that they do not hold.
        mine = {
            "square_sum": self.optimizer.grad_square_sum(),
            "loss_sum": losses.sums[0],
            "dropped": self._dropped(),
            "flags": losses.sums.new_zeros(len(raised)),
            "ahead": losses.sums[1:],
        }
        # A raised flag is a kernel argument; a flag vector from the host would cost a copy to the device in every step.
        for flag, one in zip(raised, mine["flags"], strict=True):
            if flag:
                one.fill_(flag)
        # All ranks meet here. The rest depends only on these sums and on shared limits, so all ranks decide the same.
        agreed = unpack(self._world.all_reduce(self._pack([*mine.values()]), "step").wait(), mine)
        # Numbers that change are tensors: Python's would be compiled into the kernel.
        limited = self._no_limits if limits == NO_LIMITS else to_device(limits, AGREEMENT_DTYPE, self.topology.device)
        loss, grad_norm, code, skip, self.diverged, grad_scale = self._decide(
            *(agreed["loss_sum"], agreed["square_sum"], agreed["dropped"], losses.labels),
            *(limited, used, self.loss_scale.can_fall(), self.diverged),
            *(self.config.resilience.on_nonfinite == "skip", self.config.optimizer.clip_grad),
        )
        self.loss_scale.update(code == SKIPS.index("overflowed"), skip)
        self.optimizer.step(lr, grad_scale, skip=skip)
        numbers = agreed | {
            "loss": loss,
            "grad_norm": grad_norm,
            "num_tokens": losses.labels[0],
            "skip": code,
            "ahead": losses_ahead(agreed["ahead"], losses.labels[1:], self.config.model.mtp),
        }
        if self.loss_scale.is_reported:
            numbers["loss_scale"] = used
        if load is not None and posted is not None:
            numbers["load"] = posted.wait()
            load.update(numbers["load"], skip=skip)
        return PendingResult(numbers, limits, self._pack)

    def receive_late(self) -> bool:
        """Switch the next runs to late receives, which are posted right before their use.

        Every rank must call this method after the same step. It returns whether receives were posted early until now.
        """
        was_early = not self.train_programs.is_late
        self.train_programs.receive_late()
        self.forward_programs.receive_late()
        return was_early

    def evaluate(self, steps: Iterable[Sequence[Any]]) -> float:
        """Compute the next-token loss per token over some global batches, without dropout.

        Losses of routers and of multi-token prediction are left out. The result is the same on every rank.

        Args:
            steps: this rank's microbatches of each batch.

        Raises:
            DivergenceError: token rows found no room in their experts' buffers; raised on every rank.
        """
        counts = torch.zeros(2, dtype=AGREEMENT_DTYPE, device=self.topology.device)
        if self.load is not None:
            self.load.begin()
        self._set_mode(training=False)
        for microbatches in steps:
            losses = self.executor.run(self.forward_programs.next(), microbatches, self._loss)
            counts += self._count(losses, microbatches)
        vector = pack([counts, self._dropped()])
        loss_sum, total, dropped = self._world.all_reduce(vector, "validation").wait().tolist()
        if dropped:
            raise DivergenceError(f"Validation: {without_room(int(dropped))}.")
        return float(loss_sum) / max(float(total), LEAST_LABELS)

    def post_stop(self, flags: StopFlags) -> Callable[[], list[float]]:
        """Post the all-reduce that sums the ranks' stop flags, outside a step.

        Every rank must call this method.

        Returns:
            A function that waits for the sums and returns them. Call it once, in posting order.
        """
        vector = to_device(flags, AGREEMENT_DTYPE, self.topology.device)
        posted = self._world.all_reduce(vector, "validation")
        return lambda: [float(total) for total in posted.wait().tolist()]

    def _loss(self, chunk: int, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        return self.chunks[chunk](x, microbatch)

    def _dropped(self) -> torch.Tensor:
        """Count this rank's token rows that found no room in experts' buffers since `load.begin`; 0 without experts."""
        return self.diverged.new_zeros(()) if self.load is None else self.load.overflow

    def _count(self, losses: Sequence[torch.Tensor], microbatches: Sequence[Any]) -> torch.Tensor:
        """Compute [loss sum, number of unmasked labels] on the device. Zeros except on the last stage's tp rank 0."""
        is_counted = bool(losses) and self.topology.coordinates.tp == 0
        tokens = to_device([is_counted * count_labels(microbatches)[0]], AGREEMENT_DTYPE, self.topology.device)
        return torch.cat((self._sums(losses, 1), tokens))

    def _sums(self, losses: Sequence[torch.Tensor], number: int) -> torch.Tensor:
        """Sum the microbatches' losses, each a scalar or a vector.

        Return the sum's first `number` entries on the last stage's tp rank 0, zeros elsewhere.
        """
        if not losses or self.topology.coordinates.tp != 0:
            return torch.zeros(number, dtype=AGREEMENT_DTYPE, device=self.topology.device)
        return torch.stack(list(losses)).sum(0).to(AGREEMENT_DTYPE).view(-1)[:number]


def _decide(
    loss_sum: torch.Tensor,
    square_sum: torch.Tensor,
    dropped: torch.Tensor,
    labels: torch.Tensor,
    limits: torch.Tensor,
    scale: torch.Tensor,
    scale_can_fall: torch.Tensor,
    diverged: torch.Tensor,
    forgets: bool,
    max_norm: float | None,
) -> tuple[torch.Tensor, ...]:
    """Decide a step from sums over all ranks and shared limits alone, so all ranks decide the same.

    Args:
        loss_sum, square_sum, dropped: sums over the ranks, in float64.
        labels: numbers of counted labels [1 + D].
        limits: the numbers of `StepLimits`.
        scale, scale_can_fall: the gradients' loss scale, and whether a later step may have a smaller one.
        diverged: whether an earlier step has diverged.
        forgets: whether an earlier divergence does not count.
        max_norm: largest gradient norm; None: no limit.

    Returns:
        (loss per token, gradient norm without the loss scale and before clipping, index in `SKIPS`, whether the step updates
        nothing, whether this or an earlier step has diverged, factor for the gradients that undoes the loss scale and clips)
    """
    most_loss, most_loss_here, most_norm = limits.unbind()
    # A global batch without a counted label reports a loss of zero.
    loss, unscale = loss_sum / labels[0].clamp(min=LEAST_LABELS), 1.0 / scale
    # Main grads still contain the loss scale: the norm is divided by it here, the gradients in the optimizer's pass.
    grad_norm = square_sum.sqrt() * unscale
    has_overflowed = square_sum.isfinite().logical_not()
    is_bad = loss_sum.isfinite().logical_not() | (loss > most_loss) | (dropped > 0)
    # If the scale can still fall, later steps may succeed at a lower one, so this is an overflow, not a divergence.
    is_bad = is_bad | has_overflowed & scale_can_fall.logical_not()
    # It stays set, except with `skip`. The next step is posted before the host reads this one, and must not update either.
    diverged = is_bad if forgets else diverged | is_bad
    is_outlier = (loss > most_loss_here) | (grad_norm > most_norm)
    code = skip_code(is_outlier, labels[0] == 0, has_overflowed, diverged)
    clipped = clip_factor(grad_norm, max_norm)
    return loss, grad_norm, code, code > 0, diverged, unscale if clipped is None else unscale * clipped
