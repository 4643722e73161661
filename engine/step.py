"""One optimizer step, and one validation: forward and backward over all microbatches, reduction, clipping, update.

    executor    runs the schedule; gradients go to main grads, buckets are reduced as they fill
    finish      the owned parts hold whole gradients, scaled by 1 / nominal tokens
    agree       one small all-reduce over the world: [sum of squares, loss sum, tokens, flags]
    optimizer   gradients x (nominal / actual tokens) x clip factor; AdamW on the owned parts; all-gathers posted

The loss is the sum of token losses over the unmasked tokens of the GLOBAL batch. The backward scales by the constant
1 / nominal tokens (global batch x sequence length), so that no rank needs to know the others' masks; what masks
take away is put right by one factor at the end, exactly 1.0 where nothing is masked.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from engine.config import BatchPlan, Config
from engine.errors import DivergenceError
from engine.optimizer.clip import clip_factor
from engine.optimizer.distributed import DistributedOptimizer
from engine.optimizer.grad_buffer import GradBuffers
from engine.pipeline.executor import Executor
from engine.pipeline.lowering import Program
from engine.pipeline.partition import StageLayers
from engine.tensor_parallel.parameter import ShardedParameter, WeightGradQueue
from engine.topology import Topology


class Chunk(Protocol):
    """What the engine asks of a model chunk (it is also an `nn.Module`)."""

    @property
    def queue(self) -> WeightGradQueue: ...
    def __call__(self, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor: ...
    def logits(self, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor: ...
    def train(self, mode: bool = True) -> nn.Module: ...


NO_FLAGS = (0.0, 0.0)
"""What a rank adds to the step's agreement beside its sums: whether its part of a checkpoint is written, whether it failed."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What all ranks agree on after a step.

    Attributes:
        loss: per token, in nats.
        grad_norm: global, before clipping.
        num_tokens: counted tokens of the global batch.
        flags: how many ranks raised each flag.
    """

    loss: float
    grad_norm: float
    num_tokens: int
    flags: tuple[float, ...]


@dataclass
class Engine:
    """One rank's assembled engine (see `engine.train.build`).

    Attributes:
        stages: what each pipeline stage of the model holds, in stage order.
        parameters: by global name, in forward order.
        train_program, forward_program: the lowered schedules of a training step and of a forward-only step.
    """

    config: Config
    topology: Topology
    plan: BatchPlan
    stages: Sequence[StageLayers]
    chunks: Sequence[Chunk]
    parameters: dict[str, ShardedParameter]
    buffers: GradBuffers
    optimizer: DistributedOptimizer
    executor: Executor
    train_program: Program
    forward_program: Program

    @property
    def nominal_tokens(self) -> int:
        return self.plan.tokens_per_step

    def forward_backward(self, microbatches: Sequence[Any]) -> tuple[float, int]:
        """Gradients of one global batch, reduced; returns this rank's (loss sum, tokens), zero off the last stage."""
        return self._count(self.run_microbatches(microbatches), microbatches)

    def run_microbatches(self, microbatches: Sequence[Any]) -> list[torch.Tensor]:
        """The part of `forward_backward` that reads no number back: the losses of the microbatches, where the head is."""
        self.topology.ledger.reset()
        for chunk in self.chunks:
            chunk.train(True)
        self.buffers.start(self.plan.num_microbatches)
        losses = self.executor.run(self.train_program, microbatches, self._loss, loss_scale=1.0 / self.nominal_tokens)
        self.buffers.finish()
        return losses

    def train_step(self, microbatches: Sequence[Any], lr: float) -> StepResult:
        """`forward_backward`, then `update`."""
        return self.update(*self.forward_backward(microbatches), lr)

    def update(self, loss_sum: float, num_tokens: int, lr: float, flags: Sequence[float] = NO_FLAGS) -> StepResult:
        """One update of the weights with the reduced gradients; arguments are this rank's counts.

        `flags` (as many as `NO_FLAGS`) are summed over the ranks in the same small all-reduce.

        Raises:
            DivergenceError: the loss or the gradient norm is not finite; raised on every rank, before any weight changes.
        """
        square_sum = float(self.optimizer.grad_square_sum())
        world = self.topology.axis("world")
        assert len(flags) == len(NO_FLAGS), f"{len(flags)} flags: the traffic of a step is a constant"
        square_sum, loss_sum, total, *raised = world.agree(
            [square_sum, loss_sum, num_tokens, *flags], self.topology.device, "step"
        )
        if not (math.isfinite(loss_sum) and math.isfinite(square_sum)):
            raise DivergenceError(
                f"loss sum {loss_sum} and squared gradient norm {square_sum} over {int(total)} tokens are not finite: an update "
                "would destroy the weights. Nothing was changed on any rank. Lower optimizer.lr, lengthen the warm-up, or look "
                "at the data of this step."
            )
        # A global batch without a single counted token has no gradient; its loss is reported as zero.
        tokens = max(total, 1.0)
        scale = self.nominal_tokens / tokens
        grad_norm = math.sqrt(square_sum) * scale
        self.optimizer.step(lr, scale * clip_factor(grad_norm, self.config.optimizer.clip_grad))
        return StepResult(loss_sum / tokens, grad_norm, int(total), tuple(raised))

    def evaluate(self, steps: Iterable[Sequence[Any]]) -> float:
        """Loss per token over some global batches, without dropout; the same on every rank."""
        loss_sum, num_tokens = 0.0, 0
        for chunk in self.chunks:
            chunk.train(False)
        for microbatches in steps:
            losses = self.executor.run(self.forward_program, microbatches, self._loss)
            step_loss, step_tokens = self._count(losses, microbatches)
            loss_sum += step_loss
            num_tokens += step_tokens
        loss_sum, total = self.topology.axis("world").agree([loss_sum, num_tokens], self.topology.device, "validation")
        return loss_sum / max(total, 1.0)

    def _loss(self, chunk: int, x: torch.Tensor | None, microbatch: Any) -> torch.Tensor:
        return self.chunks[chunk](x, microbatch)

    def _count(self, losses: Sequence[torch.Tensor], microbatches: Sequence[Any]) -> tuple[float, int]:
        """Loss sum and tokens, counted once per model replica: by the tp rank 0 of the last stage."""
        if not losses or self.topology.coordinates.tp != 0:
            return 0.0, 0
        num_tokens = sum(int(microbatch.loss_mask.sum()) for microbatch in microbatches)
        return float(torch.stack(list(losses)).sum()), num_tokens
