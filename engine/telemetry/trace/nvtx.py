"""Opens NVTX ranges for steps, loop parts and program instructions, which Nsight Systems shows.

    | step 12                                                                        |   ends when step 13 begins with `data`
    | data |            forward_backward            | optimizer | checkpoint |
           | 0F0 | post | 0F1 | 0B0 | post | ...

    nsys profile --trace=cuda,nvtx,osrt -o rank_%q{RANK} ...       each rank writes its own report

`0B1` is chunk 0's backward of microbatch 1. `post` is a group call, which posts sends and receives. Ranges show when the host
posted the work, in the row of the thread that runs the rank's program. Autograd's own thread launches the backward kernels, so they
appear in another row.
"""

from collections.abc import Callable

import torch

from triaxis.engine.pipeline.lowering import Instruction
from triaxis.engine.run.step_parts import FIRST, StepPart, StepWatcher
from triaxis.engine.telemetry.trace.profile import instruction_name


class NvtxRanges(StepWatcher):
    """NVTX ranges of one rank. `push` opens a nested range, `pop` ends the innermost one."""

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
        """Name the next step's range `step N`, with N = `steps_made` + 1."""
        self._step = steps_made

    def enter(self, part: StepPart) -> None:
        """End the running part's range and begin this part's. The first part also begins a new step's range."""
        if part == FIRST:
            self._step += 1
            self._pop_to(0)
            self._push_range(f"step {self._step}")
        self._pop_to(1)
        self._push_range(part)

    def instruction(self, instruction: Instruction | None) -> None:
        """End the previous instruction's range and begin this instruction's."""
        if self._depth < 2:
            return  # outside the loop's steps, as when the model writes text at the end of the run
        self._pop_to(2)
        if instruction is not None:
            self._push_range(instruction_name(instruction))

    def close(self) -> None:
        """End all open ranges."""
        self._pop_to(0)

    def _push_range(self, name: str) -> None:
        self._push(name)
        self._depth += 1

    def _pop_to(self, depth: int) -> None:
        while self._depth > depth:
            self._pop()
            self._depth -= 1
