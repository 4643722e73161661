"""Runs a lowered schedule on one pipeline rank.

The executor runs a list of instructions, which `validate.py` has checked. Its code is the same for every schedule. For each action:

    F   takes the input (tokens on the first stage), runs the chunk, and hands the output over
    B   takes the output's gradient (given on the last stage), runs the backward, and hands the input's gradient over
    I   does the same as B, but defers the weight-gradient GEMMs
    W   runs the deferred GEMMs

Between a microbatch's F and B, the rank keeps the input and an edge into the autograd graph. The output's memory is free once the
output is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from triaxis.engine.activations.backward import run_backward
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.topology import Topology
from triaxis.engine.linear.weight_grads import DeferredGrad, WeightGradQueue, add_deferred
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.pipeline.lowering import Direction, Instruction, Post, Program
from triaxis.engine.pipeline.p2p import StageTensor, Transport

InstructionObserver = Callable[[Instruction | None], None]


ChunkFunction = Callable[[int, torch.Tensor | None, Any], torch.Tensor]
"""Function (number of this rank's chunk, x or None on the first stage, microbatch) -> the chunk's output."""


@dataclass(slots=True)
class _Kept:
    """A chunk's input, None on the first stage, and the graph edge where its backward starts."""

    x: torch.Tensor | None
    edge: GradientEdge


@dataclass(eq=False)
class Executor:
    """One rank's interpreter of programs (lowered schedules).

    Training and validation share an executor. Activations between stages have one shape and dtype.

    Attributes:
        topology: this rank's place and pipeline axes.
        queues: weight-gradient queue for each chunk on this rank.
        shape: shape of an activation between stages, [s(/t), b, h].
        observers: functions called with each instruction before it runs, and with None after the last.
        running: the instruction that runs, or that raised an error, for error reports; None between two programs.
    """

    topology: Topology
    queues: Sequence[WeightGradQueue]
    shape: tuple[int, ...]
    dtype: torch.dtype
    observers: Sequence[InstructionObserver] = ()
    running: Instruction | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.axes: dict[Direction, Axis] = {
            "forward": self.topology.axis("pp_forward"),
            "backward": self.topology.axis("pp_backward"),
        }

    def run(
        self,
        program: Program,
        microbatches: Sequence[Any],
        function: ChunkFunction,
        output_grad: torch.Tensor | None = None,
        observers: Sequence[InstructionObserver] = (),
    ) -> list[torch.Tensor]:
        """Run the program; gradients go to the main grads.

        Args:
            program: program for this topology's pp size and for as many microbatches as are given.
            microbatches: one batch per microbatch; every stage gets it.
            output_grad: gradient for each output of the last stage, with as many elements as an output; None: the program has no
                backward.
            observers: additional observers for this run alone, called after the executor's.

        Returns:
            The last stage's outputs in microbatch order, detached; an empty list on ranks without the last stage.
        """
        return _Run(self, program, microbatches, function, output_grad, observers).run()


@dataclass(eq=False)
class _Run:
    """One run of a program, with the inputs, deferred GEMMs and outputs that it keeps."""

    executor: Executor
    program: Program
    microbatches: Sequence[Any]
    function: ChunkFunction
    output_grad: torch.Tensor | None
    observers: Sequence[InstructionObserver]

    def __post_init__(self) -> None:
        executor, schedule = self.executor, self.program.schedule
        topology = executor.topology
        assert len(self.microbatches) == schedule.num_microbatches
        self.rank = topology.coordinates.pp
        self.schedule, self.placement = schedule, schedule.placement
        self.forward_only = schedule.forward_only
        self.transport = Transport(
            executor.axes,
            executor.shape,
            executor.dtype,
            topology.device,
        )
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.deferred: dict[tuple[int, int], list[DeferredGrad]] = {}
        self.outputs: dict[int, torch.Tensor] = {}

    def run(self) -> list[torch.Tensor]:
        observers = (*self.executor.observers, *self.observers)
        with torch.set_grad_enabled(not self.forward_only):
            for instruction in self.program.instructions[self.rank]:
                self.executor.running = instruction
                for observe in observers:
                    observe(instruction)
                # A post does not wait; the action that reads the tensor does (`Transport.take`).
                if isinstance(instruction, Post):
                    self.transport.post(instruction)
                elif instruction.kind is Kind.F:
                    self.forward(instruction)
                elif instruction.kind is Kind.W:
                    self.weight_grads(instruction)
                else:
                    self.backward(instruction)
            # Not in a `finally`: after an error, `running` still names the instruction.
            self.executor.running = None
            for observe in observers:
                observe(None)
        self.transport.finish()
        assert not self.kept and not self.deferred, "a forward without backward, or deferred work without a W"
        return [self.outputs[microbatch] for microbatch in sorted(self.outputs)]

    def forward(self, action: Action) -> None:
        chunk, microbatch = action.chunk, action.microbatch
        stage = self.placement.stage_of(self.rank, chunk)
        x, goes_back = None, not self.schedule.forward_only
        if stage > 0:
            # [s(/t), b, h], a leaf: its gradient goes to the previous stage.
            x = self.transport.take(StageTensor("forward", stage, microbatch))
            x.requires_grad_(goes_back)
        with torch.set_grad_enabled(goes_back):
            output = self.function(chunk, x, self.microbatches[microbatch])
        if goes_back:
            self.kept[chunk, microbatch] = _Kept(x, get_gradient_edge(output))
        if stage == self.placement.num_stages - 1:
            self.outputs[microbatch] = output.detach()
        else:
            # Detached: the next stage has its own graph, even if it is on this rank.
            self._hand_over("forward", stage + 1, microbatch, output.detach())

    def backward(self, action: Action) -> None:
        chunk, microbatch = action.chunk, action.microbatch
        stage = self.placement.stage_of(self.rank, chunk)
        kept = self.kept.pop((chunk, microbatch))
        if stage == self.placement.num_stages - 1:
            assert self.output_grad is not None, "a backward needs the gradient of the outputs"
            # The scale is float64 [1 + D]; the backward begins in the output's dtype and shape.
            output = self.outputs[microbatch]
            grad = torch.empty_like(output).copy_(self.output_grad.view_as(output))
        else:
            grad = self.transport.take(StageTensor("backward", stage, microbatch))
        # Layers ask the queue inside their backward. Deferred GEMMs wait for this microbatch's W, last layer first.
        queue = self.executor.queues[chunk]
        queue.deferring = action.kind is Kind.I
        run_backward(kept.edge, grad)
        if action.kind is Kind.I:
            queue.deferring = False
            self.deferred[chunk, microbatch] = queue.take()
        # After an I, this comes before its W: the previous stage waits for dX [s(/t), b, h], not for weight gradients.
        if kept.x is not None:
            assert kept.x.grad is not None
            self._hand_over("backward", stage - 1, microbatch, kept.x.grad)

    def weight_grads(self, action: Action) -> None:
        """Run the weight-gradient GEMMs that the same microbatch's I (input gradient) deferred."""
        add_deferred(self.deferred.pop((action.chunk, action.microbatch)))

    def _hand_over(self, direction: Any, stage: int, microbatch: int, tensor: torch.Tensor) -> None:
        local = self.placement.rank_of(stage) == self.rank
        self.transport.hand_over(StageTensor(direction, stage, microbatch), tensor, local=local)
