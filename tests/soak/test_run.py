"""Reading of a run's files, also of a run directory that was removed and made again."""

from pathlib import Path

import pytest

from tests.soak.output_faults import LOST_LINES
from tests.soak.run import Run
from triaxis.engine.telemetry.outlets.lossy_file import Gap
from triaxis.engine.telemetry.outlets.terminal import PAUSED
from triaxis.engine.telemetry.record.events import EventLog
from triaxis.engine.telemetry.record.jsonl import JsonLines


class Writer:
    """Files of a run directory, as a run writes them."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.metrics = JsonLines(path / "metrics.jsonl")
        self.events = EventLog(path / "events" / "node_00000.jsonl", attempt=0)

    def step(self, step: int, unix_time_seconds: float) -> None:
        self.metrics.write({"step": step, "attempt": 0, "unix_time_seconds": unix_time_seconds})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path, [], tmp_path / "disk")
    run.attempt = 0
    return run


def test_the_slowest_step_is_not_one_of_the_first_two(run: Run) -> None:
    writer = Writer(run.path)
    assert run.slowest_seconds() == 0.0
    for step, time_seconds in enumerate([100.0, 140.0, 141.0, 144.5, 145.0], start=1):
        writer.step(step, time_seconds)
    run.read()
    assert run.slowest_seconds() == 3.5


def test_a_directory_that_is_made_again_is_read_from_its_beginning(run: Run) -> None:
    before = Writer(run.path)
    before.step(1, 100.0)
    before.events.write("begun", step=0)
    run.read()
    run.remove_directory()
    run.read()
    assert run.last_step() == 1 and list(run.path.parent.iterdir()) == []
    after = Writer(run.path)
    after.step(3, 102.0)
    after.events.write("directory_put_back", message="made again")
    run.read()
    assert [row["step"] for row in run.rows()] == [1, 3]
    assert [event["kind"] for event in run.events] == ["begun", "directory_put_back"]


def test_the_count_of_lost_lines_is_found_in_what_rank_0_writes() -> None:
    text = ""
    for num_lines in (1, 17):
        gap = Gap()
        gap.lose(b"a line\n" * num_lines)
        text += gap.report(PAUSED, after=b"\n").decode()
    assert LOST_LINES.findall(text) == ["1", "17"]
