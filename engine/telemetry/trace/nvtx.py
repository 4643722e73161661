"""NVTX ranges for Nsight Systems, named as a trace of the profiler is: steps, parts of the loop, instructions of the program.

    | step 12                                                                        |   from its data to the next step's
    | data |            forward_backward            | optimizer | checkpoint |
           | 0F0 | post | 0F1 | 0B0 | post | ...

    nsys profile --trace=cuda,nvtx,osrt -o rank_%q{RANK} ...       each rank writes a report of its own

A range belongs to the thread that walks the program, and shows when the host posted the work. Kernels of a backward are launched by
autograd's own thread: at the same time as the range of their action, in another row.
"""

from collections.abc import Callable

import torch

from triaxis.engine.pipeline.lowering import Instruction
from triaxis.engine.run.step_parts import FIRST, StepPart, StepWatcher
from triaxis.engine.telemetry.trace.profile import instruction_name


class NvtxRanges(StepWatcher):
    """The ranges of one rank; `push` begins a range inside of those that are open, `pop` ends the innermost."""

    def __init__(
        self,
        push: Callable[[str], object] = torch.cuda.nvtx.range_push,
        pop: Callable[[], object] = torch.cuda.nvtx.range_pop,
    ) -> None:
        self._step = 0
        self._push = push
        self._pop = pop
        self._depth = 0

    def begin(self, steps_made: int) -> None:
        """Count steps from here."""
        self._step = steps_made

    def enter(self, part: StepPart) -> None:
        """Follow the loop to its next part; a step begins with its first one."""
        if part == FIRST:
            self._step += 1
            self._pop_to(0)
            self._push_range(f"step {self._step}")
        self._pop_to(1)
        self._push_range(part)

    def instruction(self, instruction: Instruction | None) -> None:
        """End the range of the instruction before, and begin that of this one."""
        if self._depth < 2:
            return  # outside of the loop's steps: text that is written at the end
        self._pop_to(2)
        if instruction is not None:
            self._push_range(instruction_name(instruction))

    def close(self) -> None:
        """End the ranges that are open."""
        self._pop_to(0)

    def _push_range(self, name: str) -> None:
        self._push(name)
        self._depth += 1

    def _pop_to(self, depth: int) -> None:
        while self._depth > depth:
            self._pop()
            self._depth -= 1
