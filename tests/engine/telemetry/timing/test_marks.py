"""Marks cut a step without gaps, on the host's clock and, with events that play a device, on a stream's."""

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.timing.clocks import HostClock, StreamClock, clock_of
from triaxis.engine.telemetry.timing.marks import Activity, TimeMarks
from triaxis.engine.telemetry.timing.time_split import span_of

CPU = torch.device("cpu")
F0, B0 = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)


class Device:
    """A stream: what is launched ends `seconds` after what was launched before it; an event is reached with the work before it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_events = 0

    def work(self, seconds: float) -> None:
        self.seconds += seconds

    def clock(self) -> StreamClock:
        return StreamClock(CPU, lambda: Event(self), lambda device: None)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at, self.is_awaited = device, -1.0, False
        device.num_events += 1

    def record(self) -> None:
        self.at = self.device.seconds

    def synchronize(self) -> None:
        self.is_awaited = True

    def elapsed_time(self, end_event: "Event") -> float:
        return (end_event.at - self.at) * 1e3


class Call:
    """A call of a backend that takes its time when it is waited for."""

    def __init__(self, device: Device, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def wait(self) -> None:
        self.device.work(self.seconds)

    def is_completed(self) -> bool:
        return False


def test_parts_instructions_and_waits_become_what_a_rank_did() -> None:
    device = Device()
    clock = device.clock()
    marks = TimeMarks(clock)
    ledger = Ledger([marks])
    marks.begin(2, is_marked=True)
    device.work(0.5)
    marks.enter(StepPart.DATA)
    device.work(1.0)
    marks.enter(StepPart.FORWARD_BACKWARD)
    marks.instruction(F0)
    device.work(2.0)
    posted = ledger.post("all_reduce", "tp", "mlp forward", torch.zeros(1), 2)
    pending = Pending(torch.zeros(1), [Call(device, 4.0)], written=(ledger, posted))
    pending.wait()
    pending.wait()
    device.work(8.0)
    marks.instruction(None)
    device.work(16.0)
    marks.end_step(next_is_marked=False)
    assert [event.phase for event in ledger.events] == ["post", "wait"]

    assert marks.take(2) is None
    marked = marks.take(3)
    assert marked is not None and marks.take(3) is None
    assert marked.activities == [
        Activity(StepPart.OTHER),
        Activity(StepPart.DATA),
        Activity(StepPart.FORWARD_BACKWARD),
        Activity(StepPart.FORWARD_BACKWARD, F0),
        Activity(StepPart.FORWARD_BACKWARD, F0, posted),
        Activity(StepPart.FORWARD_BACKWARD, F0),
        Activity(StepPart.FORWARD_BACKWARD),
    ]
    assert clock.elapsed(marked.marks) == [0.0, 0.5, 1.5, 1.5, 3.5, 7.5, 15.5, 31.5]
    # Nothing is waited for but the last event, which stands behind everything that was read.
    assert [event.is_awaited for event in marked.marks] == [False] * 7 + [True]


def test_a_read_by_the_host_is_marked_from_its_beginning_to_its_end() -> None:
    device = Device()
    marks = TimeMarks(device.clock())
    ledger = Ledger([marks])
    marks.begin(0, is_marked=True)
    marks.enter(StepPart.FORWARD_BACKWARD)
    marks.instruction(F0)
    device.work(2.0)
    with ledger.host_read("experts counts"):
        # The host launches nothing until it has the numbers: the stream runs empty.
        device.work(0.25)
    device.work(1.0)
    marks.instruction(None)
    marks.end_step(next_is_marked=False)
    (mark,) = ledger.events
    assert (mark.phase, mark.op, mark.purpose) == ("mark", "host_read", "experts counts")
    marked = marks.take(1)
    assert marked is not None
    times = marks.clock.elapsed(marked.marks)
    (place,) = [place for place, activity in enumerate(marked.activities) if activity.wait is not None]
    assert marked.activities[place] == Activity(StepPart.FORWARD_BACKWARD, F0, mark)
    assert span_of(marked.activities[place]) == "host_read"
    assert (times[place], times[place + 1]) == (2.0, 2.25)
    assert span_of(marked.activities[place + 1]) == "compute" and times[place + 2] == 3.25


def test_a_step_that_nobody_wants_costs_no_event() -> None:
    device = Device()
    marks = TimeMarks(device.clock())
    marks.begin(0, is_marked=False)
    per_step = []
    for step in range(1, 6):
        before = device.num_events
        marks.enter(StepPart.FORWARD_BACKWARD)
        marks.instruction(B0)
        marks.instruction(None)
        marks.end_step(next_is_marked=step + 1 in (2, 4))
        per_step.append(device.num_events - before)
    # The mark at the beginning of step 2 and 4 is made where step 1 and 3 end.
    assert per_step == [1, 4, 1, 4, 0]
    assert marks.take(1) is None
    later = marks.take(4)
    assert later is not None and later.step == 4, "steps before it are forgotten"
    assert marks.take(5) is None


def test_going_back_forgets_what_was_not_taken_and_counts_anew() -> None:
    marks = TimeMarks(HostClock())
    marks.begin(10, is_marked=True)
    marks.enter(StepPart.DATA)
    marks.end_step(next_is_marked=True)
    marks.enter(StepPart.DATA)
    marks.begin(4, is_marked=True)
    marks.enter(StepPart.DATA)
    marks.end_step(next_is_marked=True)
    assert marks.take(4) is None
    again = marks.take(5)
    assert again is not None and again.activities == [Activity(StepPart.OTHER), Activity(StepPart.DATA)]
    marks.close()
    marks.enter(StepPart.DATA)
    marks.end_step(next_is_marked=False)
    assert marks.take(6) is None


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["data", "forward_backward", F0, B0, "wait", "end"]), max_size=30))
def test_steps_follow_each_other_without_a_gap(calls: list[Any]) -> None:
    clock = HostClock()
    marks = TimeMarks(clock)
    marks.begin(0, is_marked=True)
    ledger = Ledger()
    for call in [*calls, "end"]:
        if call == "end":
            marks.end_step(next_is_marked=True)
        elif call == "wait":
            marks.wait_begins(ledger.post("all_reduce", "dp", "gradients", torch.zeros(1), 2))
            marks.wait_ends()
        elif isinstance(call, Action):
            marks.instruction(call)
        else:
            marks.enter(call)
    end = None
    for step in range(1, calls.count("end") + 2):
        marked = marks.take(step)
        assert marked is not None and len(marked.marks) == len(marked.activities) + 1
        assert marked.marks == sorted(marked.marks)
        assert end is None or marked.marks[0] - end < 0.01
        end = marked.marks[-1]


def test_an_anchor_is_a_moment_of_both_clocks() -> None:
    before = time.perf_counter()
    mark, seconds = HostClock().anchor()
    assert mark == seconds and before <= seconds <= time.perf_counter()
    device = Device()
    event, seconds = device.clock().anchor()
    assert before <= seconds <= time.perf_counter()
    assert event.is_awaited and event.at == 0.0
    assert isinstance(clock_of(CPU), HostClock)


@pytest.mark.gpu
@pytest.mark.card
def test_on_a_gpu_events_see_how_long_kernels_take() -> None:
    device = torch.device("cuda", 0)
    clock = clock_of(device)
    matrix = torch.ones(4096, 4096, device=device)
    # The first product also starts cuBLAS, for longer than several products take.
    matrix = matrix @ matrix / 4096
    marks = []
    for repeats in (1, 20, 0):
        marks.append(clock.mark())
        for _ in range(repeats):
            matrix = matrix @ matrix / 4096
    torch.cuda.synchronize(device)
    start, once, often = clock.elapsed(marks)
    assert start == 0.0 and often - once > 5 * once > 0.0
