"""NVTX ranges: their names, how they lie in each other, and that whatever is pushed is popped."""

from collections.abc import Sequence

import pytest

from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.trace.nvtx import NvtxRanges
from triaxis.engine.telemetry.trace.profile import instruction_name


class Ranges:
    """What a tool would see: (depth, name) of each range in the order of their beginnings."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        self.open: list[str] = []

    def push(self, name: str) -> None:
        self.seen.append((len(self.open), name))
        self.open.append(name)

    def pop(self) -> None:
        self.open.pop()


def run_steps(
    nvtx: NvtxRanges,
    steps: int,
    parts: Sequence[StepPart] = (StepPart.DATA, StepPart.FORWARD_BACKWARD, StepPart.OPTIMIZER),
) -> None:
    for _ in range(steps):
        for part in parts:
            nvtx.enter(part)


def test_steps_are_counted_from_one_and_hold_their_phases() -> None:
    ranges = Ranges()
    nvtx = NvtxRanges(ranges.push, ranges.pop)
    nvtx.begin(11)
    run_steps(nvtx, 2, ("data", "validation"))
    assert ranges.open == ["step 13", "validation"]
    nvtx.close()
    assert ranges.open == []
    expected = [(0, "step 12"), (1, "data"), (1, "validation"), (0, "step 13"), (1, "data"), (1, "validation")]
    assert ranges.seen == expected


def follow_a_step(rank: int, case: Case) -> tuple[list[tuple[int, str]], list[str], list[str]]:
    """(ranges of the second step, names of the rank's instructions, what is open at the end)."""
    engine, batches = build_rank(rank, case)
    ranges = Ranges()
    nvtx = NvtxRanges(ranges.push, ranges.pop)
    engine.executor.observers = (nvtx.instruction,)
    for _ in range(2):
        ranges.seen.clear()
        nvtx.enter(StepPart.DATA)
        microbatches = batches.next_step()
        nvtx.enter(StepPart.FORWARD_BACKWARD)
        engine.train_step(microbatches, 1e-3)
    nvtx.close()
    engine.evaluate([batches.next_step()])
    batches.close()
    row = engine.train_programs.early.instructions[engine.topology.coordinates.pp]
    return ranges.seen, [instruction_name(each) for each in row], ranges.open


@pytest.mark.distributed
def test_actions_are_named_as_the_schedule_names_them_inside_their_part() -> None:
    for seen, names, still_open in run_ranks(follow_a_step, 2, Case("gpt", pp=2, vpp=2, global_batch_size=4)):
        assert seen == [(0, "step 2"), (1, "data"), (1, "forward_backward"), *((2, name) for name in names)]
        assert "0F0" in names and "1B3" in names and "post" in names
        assert still_open == [], "after the last step nothing is named"


@pytest.mark.gpu
def test_a_build_for_gpus_takes_them() -> None:
    """A CPU build of torch raises at the first push."""
    nvtx = NvtxRanges()
    run_steps(nvtx, 2)
    nvtx.close()
