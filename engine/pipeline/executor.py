"""Runs a lowered schedule on one pipeline rank.

The executor runs a list of instructions, which `validate.py` has checked. Its code is the same for every schedule. For each action:

    F   takes the input (tokens on the first stage), runs the chunk, and hands the output over
    B   takes the output's gradient (given on the last stage), runs the backward, and hands the input's gradient over
    I   does the same as B, but defers the weight-gradient GEMMs
    W   runs the deferred GEMMs

A `Work` (`work.py`) runs a microbatch's actions in one chunk. The output's memory is free once the output is sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.topology import Topology
from triaxis.engine.linear.weight_grads import WeightGradQueue
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.pipeline.lowering import Direction, Instruction, Post, Program
from triaxis.engine.pipeline.p2p import StageTensor, Transport
from triaxis.engine.pipeline.work import ChunkFunction, Work, WorksOf, eager_works

InstructionObserver = Callable[[Instruction | None], None]


@dataclass(eq=False)
class Executor:
    """One rank's interpreter of programs (lowered schedules).

    Training and validation share an executor. Activations between stages have one shape and dtype.

    Attributes:
        topology: this rank's place and pipeline axes.
        queues: weight-gradient queue for each chunk on this rank.
        shape: shape of an activation between stages, [s(/t), b, h].
        observers: functions called with each instruction before it runs, and with None after the last.
        works: how the microbatches of a run with a backward are computed.
        running: the instruction that runs, or that raised an error, for error reports; None between two programs.
    """

    topology: Topology
    queues: Sequence[WeightGradQueue]
    shape: tuple[int, ...]
    dtype: torch.dtype
    observers: Sequence[InstructionObserver] = ()
    works: WorksOf = eager_works
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
    """One run of a program, with the works that have begun and the outputs that it keeps."""

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
        if not self.forward_only:
            self.work_of = executor.works(self.program.instructions[self.rank], self.function, executor.queues)
        self.begun: dict[tuple[int, int], Work] = {}
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
        assert not self.begun, "a forward without backward, or deferred work without a W"
        return [self.outputs[microbatch] for microbatch in sorted(self.outputs)]

    def forward(self, action: Action) -> None:
        chunk, microbatch = action.chunk, action.microbatch
        stage = self.placement.stage_of(self.rank, chunk)
        x = None if stage == 0 else self.transport.take(StageTensor("forward", stage, microbatch))
        if self.forward_only:
            output = self.function(chunk, x, self.microbatches[microbatch])
        else:
            work = self.begun[chunk, microbatch] = self.work_of(chunk, microbatch)
            output = work.forward(x, self.microbatches[microbatch])
        if stage == self.placement.num_stages - 1:
            self.outputs[microbatch] = output
        else:
            self._hand_over("forward", stage + 1, microbatch, output)

    def backward(self, action: Action) -> None:
        chunk, microbatch = action.chunk, action.microbatch
        stage = self.placement.stage_of(self.rank, chunk)
        if stage == self.placement.num_stages - 1:
            assert self.output_grad is not None, "a backward needs the gradient of the outputs"
            # The scale is float64 [1 + D]; the backward begins in the output's dtype and shape.
            output = self.outputs[microbatch]
            grad = torch.empty_like(output).copy_(self.output_grad.view_as(output))
        else:
            grad = self.transport.take(StageTensor("backward", stage, microbatch))
        defers = action.kind is Kind.I
        work = self.begun[chunk, microbatch] if defers else self.begun.pop((chunk, microbatch))
        x_grad = work.backward(grad, defers=defers)
        # After an I, this comes before its W: the previous stage waits for dX [s(/t), b, h], not for weight gradients.
        if stage > 0:
            assert x_grad is not None
            self._hand_over("backward", stage - 1, microbatch, x_grad)

    def weight_grads(self, action: Action) -> None:
        """Run the weight-gradient GEMMs that the same microbatch's I (input gradient) deferred."""
        self.begun.pop((action.chunk, action.microbatch)).weight_grads()

    def _hand_over(self, direction: Any, stage: int, microbatch: int, tensor: torch.Tensor) -> None:
        local = self.placement.rank_of(stage) == self.rank
        self.transport.hand_over(StageTensor(direction, stage, microbatch), tensor, local=local)
