"""Traces operators and kernels of some steps on one rank with the torch profiler.

    | data |            forward_backward            | optimizer | checkpoint |        loop parts
           | 0F0 | post | 0F1 | 0B0 | post | ...                                      instructions in the rank's program
           | layers.0 | layers.1 | ...                                                layers in an instruction

A trace opens in https://ui.perfetto.dev or chrome://tracing. Traced steps run slower, so do not report their times.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from triaxis.engine.config.schema.telemetry import ProfileConfig
from triaxis.engine.pipeline.lowering import Instruction, Post
from triaxis.engine.run.step_parts import FIRST, StepPart, StepWatcher
from triaxis.engine.telemetry.trace.layer_ranges import LayerRanges

POST = "post"
"""Range name for a group call; its sends and receives are inside."""


def instruction_name(instruction: Instruction) -> str:
    """Name an instruction, as in `0F3` for an action and `post` for a group call."""
    return POST if isinstance(instruction, Post) else str(instruction)


class StepProfiler(StepWatcher):
    """Traces the configured steps on one rank.

    Args:
        config: steps to trace, counted from 1.
        path: trace file, a `.json.gz`; its folder is created.
        device: the rank's device; if it is a GPU, the trace includes its kernels.

    Attributes:
        on_written: function (path), called once the trace is written.
    """

    def __init__(self, config: ProfileConfig, path: Path, device: torch.device) -> None:
        self._steps = range(config.start, config.start + config.steps)
        self._path = path
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._step = 0
        self.on_written: Callable[[Path], None] = lambda path: None
        self._profile: profile | None = None
        self._ranges: list[record_function] = []
        self._layers = LayerRanges()

    def begin(self, steps_made: int) -> None:
        """Set the number of completed steps to `steps_made`. A trace is written once, even if steps are repeated."""
        self._step = steps_made

    def enter(self, part: StepPart) -> None:
        """Begin a range for `part`. The first traced step starts the trace, and the step after the last writes it.

        A run that begins amid the configured steps traces the rest of them.
        """
        if part == FIRST:
            self._step += 1
            if self._step in self._steps and self._profile is None:
                # `acc_events`: torch 2.11 warns at the start of a trace's only cycle without it.
                self._profile = profile(activities=self._activities, acc_events=True)
                self._profile.start()
                self._layers.open()
            elif self._step not in self._steps:
                self.close()
        if self._profile is not None:
            self._leave_to(0)
            self._enter_range(part)

    def instruction(self, instruction: Instruction | None) -> None:
        """End the previous instruction's range and begin this instruction's."""
        if self._profile is None:
            return
        self._layers.end()
        self._leave_to(1)
        if instruction is not None:
            self._enter_range(instruction_name(instruction))

    def close(self) -> None:
        """Write the open trace, if any. If writing fails, print the error to standard error and go on."""
        if self._profile is None:
            return
        self._layers.close()
        self._leave_to(0)
        done, self._profile = self._profile, None
        done.stop()
        self._steps = range(0)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(self._path))
        except OSError as error:
            print(f"the trace could not be written, training goes on: {error}", file=sys.stderr)
        else:
            self.on_written(self._path)

    def _enter_range(self, name: str) -> None:
        self._ranges.append(record_function(name))
        self._ranges[-1].__enter__()

    def _leave_to(self, depth: int) -> None:
        """End open ranges until `depth` are left: of a loop part such as `forward_backward`, and of an instruction in it."""
        while len(self._ranges) > depth:
            self._ranges.pop().__exit__(None, None, None)
