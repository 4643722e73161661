"""Which steps are measured for which line, on one rank: from the beginning, resumed, sampled on a stream, after going back."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.engine.telemetry.timing.test_marks import Device
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.schema.telemetry import TelemetryConfig
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.timing.clocks import HostClock, StreamClock
from triaxis.engine.telemetry.timing.marks import TimeMarks
from triaxis.engine.telemetry.timing.step_times import StepTimes
from triaxis.engine.telemetry.timing.timeline import RowIdentity, Timeline, merge
from triaxis.engine.telemetry.timing.timers import has_line

CPU = torch.device("cpu")
SCHEDULE = schedules.build("1f1b", 1, 1, 1)
NUM_STEPS = 12
Lines = dict[int, tuple[int, int]]


class Run:
    """The calls that a training loop makes, without anything between them."""

    def __init__(
        self,
        steps_made: int = 0,
        log_interval: int = 5,
        clock: HostClock | StreamClock | None = None,
        timeline: Timeline | None = None,
        time_split: bool = True,
    ) -> None:
        self.marks = TimeMarks(clock or HostClock())
        self.times = StepTimes(
            TelemetryConfig(log_interval=log_interval, time_split=time_split),
            Topology(RankGrid(ParallelSizes()), 0, CPU).observed([self.marks]),
            SCHEDULE,
            self.marks,
            num_steps=NUM_STEPS,
            timeline=timeline,
        )
        self.times.begin(steps_made)
        self.lines: Lines = {}
        self.posted = steps_made

    def train(self, until: int = NUM_STEPS, read_late: bool = True) -> Lines:
        """Steps up to `until`; the numbers of a step are read when the next one is posted, but those of the last one at once."""
        told = self.posted
        while self.posted < until:
            for part in (StepPart.DATA, StepPart.FORWARD_BACKWARD):
                self.times.enter(part)
            self.marks.instruction(Action(Kind.F, 0, 0))
            self.marks.instruction(None)
            self.times.enter(StepPart.OPTIMIZER)
            self.times.end_step()
            self.posted += 1
            for step in self._read(told, until, read_late):
                told = step
                split = self.times.on_step(step)
                if split is not None:
                    self.lines[step] = (split.first_step, split.last_step)
            self.times.enter(StepPart.CHECKPOINT)
        return self.lines

    def _read(self, told: int, until: int, read_late: bool) -> Iterable[int]:
        return range(told + 1, self.posted + (self.posted == until or not read_late))


@pytest.mark.parametrize("read_late", [True, False])
@pytest.mark.parametrize(
    ("steps_made", "log_interval", "lines"),
    [
        # The first step of an attempt warms up.
        (0, 5, {5: (2, 4), 10: (5, 9), 12: (10, 11)}),
        (0, 1, {step: (step - 1, step - 1) for step in range(3, 13)}),
        (0, 100, {12: (2, 11)}),
        (7, 5, {10: (9, 9), 12: (10, 11)}),
        (9, 5, {12: (11, 11)}),
        (11, 5, {}),
    ],
)
def test_a_line_shows_the_steps_since_the_line_before(
    steps_made: int, log_interval: int, lines: Lines, read_late: bool
) -> None:
    assert Run(steps_made, log_interval).train(read_late=read_late) == lines


def test_on_a_stream_the_step_before_a_line_is_measured() -> None:
    device = Device()
    run = Run(clock=device.clock())
    assert run.train() == {5: (4, 4), 10: (9, 9), 12: (11, 11)}
    # Steps 4, 9 and 11: seven parts of a step and its end.
    assert device.num_events == 3 * 9


def test_a_run_that_goes_back_measures_anew() -> None:
    run = Run()
    run.train(until=8)
    run.times.begin(3)
    run.posted = 3
    assert run.train() == {5: (4, 4), 10: (5, 9), 12: (10, 11)}


def test_without_split_and_timeline_nothing_is_told(tmp_path: Path) -> None:
    run = Run(time_split=False)
    assert run.train() == {}
    run.times.finish()


@pytest.mark.parametrize(("steps_made", "traced"), [(0, [4, 5]), (4, [5]), (5, [])], ids=str)
@pytest.mark.parametrize("on_stream", [False, True])
def test_a_timeline_has_its_steps_and_no_other(
    tmp_path: Path, steps_made: int, traced: list[int], on_stream: bool
) -> None:
    path = tmp_path / "timeline" / "attempt_00" / "rank_00000.json"
    timeline = Timeline(range(4, 6), RowIdentity(0, 1, "alone", 0, SCHEDULE.placement), path)
    run = Run(steps_made, clock=Device().clock() if on_stream else None, timeline=timeline, time_split=False)
    assert run.train() == {}
    run.times.finish()
    assert path.exists() == bool(traced)
    if traced:
        text = merge(tmp_path).path.read_text()
        assert [step for step in range(1, NUM_STEPS + 1) if f'"step {step}"' in text] == traced
        assert text.count('"0F0"') == len(traced)


def test_a_run_that_breaks_leaves_the_steps_that_were_read(tmp_path: Path) -> None:
    path = tmp_path / "timeline" / "attempt_00" / "rank_00000.json"
    run = Run(timeline=Timeline(range(2, 11), RowIdentity(0, 1, "alone", 0, SCHEDULE.placement), path))
    run.train(until=4)
    run.times.close()
    assert [step for step in range(1, 12) if f'"step {step}"' in path.read_text()] == [2, 3, 4]


def test_a_row_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_the_way = tmp_path / "timeline"
    in_the_way.write_text("a file where a folder should be")
    row = RowIdentity(0, 1, "alone", 0, SCHEDULE.placement)
    run = Run(timeline=Timeline(range(4, 6), row, in_the_way / "attempt_00" / "rank_00000.json"))
    assert run.train() == {5: (2, 4), 10: (5, 9), 12: (10, 11)}
    run.times.finish()
    assert "rank 0: its row of the timeline is not written" in capsys.readouterr().err


def test_lines_stand_at_the_ends_and_every_interval() -> None:
    assert [step for step in range(1, 15) if has_line(step, 5, NUM_STEPS)] == [1, 5, 10, 12]
