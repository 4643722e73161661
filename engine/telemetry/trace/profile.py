"""A trace of some steps of one rank, by torch's profiler: operators and kernels, inside ranges named as the schedule names them.

    | data |            forward_backward            | optimizer | checkpoint |        phases of the loop
           | 0F0 | post | 0F1 | 0B0 | post | ...                                      instructions of the rank's program

A trace opens in https://ui.perfetto.dev or chrome://tracing. While steps are traced they are slower, so their times are good for
looking at one beside the other, not for reporting.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from engine.config.telemetry import ProfileConfig
from engine.pipeline.lowering import Instruction, Post
from engine.run.phases import FIRST, Phase

POST = "post"
"""Range of a group call; sends and receives of its messages are in it."""


def instruction_name(instruction: Instruction) -> str:
    """`0F3` for an action, `post` for a group call."""
    return POST if isinstance(instruction, Post) else str(instruction)


class StepWatcher(Protocol):
    """Who follows a rank through its steps: told of the loop's phases, and of the instructions of its executor."""

    def phase(self, phase: Phase) -> None: ...
    def instruction(self, instruction: Instruction | None) -> None: ...
    def close(self) -> None: ...


class StepProfiler:
    """Traces the steps that the configuration names, on one rank.

    Args:
        config: which steps; they are counted from 1.
        path: where the trace goes, a `.json.gz`; its folder is made.
        device: of the rank; a GPU's kernels are in its trace.
        steps_made: before this attempt. Steps that were made then are not traced.
        on_written: called with the path once the trace is there.
    """

    def __init__(
        self,
        config: ProfileConfig,
        path: Path,
        device: torch.device,
        steps_made: int,
        on_written: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._steps = range(config.start, config.start + config.steps)
        self._path = path
        self._activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self._step = steps_made
        self._on_written = on_written
        self._profile: profile | None = None
        self._phase: record_function | None = None
        self._instruction: record_function | None = None

    def phase(self, phase: Phase) -> None:
        """Follow the loop to its next phase; traced steps begin and end here."""
        if phase == FIRST:
            self._step += 1
            if self._step in self._steps and self._profile is None:
                self._profile = profile(activities=self._activities)
                self._profile.start()
            elif self._step not in self._steps:
                self.close()
        if self._profile is not None:
            self._leave()
            self._phase = _entered(phase)

    def instruction(self, instruction: Instruction | None) -> None:
        """The observer of an executor (`engine.pipeline.executor.Executor`)."""
        if self._profile is None:
            return
        if self._instruction is not None:
            self._instruction.__exit__(None, None, None)
        self._instruction = None
        if instruction is not None:
            self._instruction = _entered(instruction_name(instruction))

    def close(self) -> None:
        """Write the trace if one is open: the last traced step is over, or the run is. A full disk is a line in the rank's log."""
        if self._profile is None:
            return
        self._leave()
        done, self._profile = self._profile, None
        done.stop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(self._path))
        except OSError as error:
            print(f"the trace could not be written, training goes on: {error}", file=sys.stderr)
        else:
            self._on_written(self._path)

    def _leave(self) -> None:
        """End the ranges that are open; after an error in a step there may be two."""
        self.instruction(None)
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None


def _entered(name: str) -> record_function:
    span = record_function(name)
    span.__enter__()
    return span
