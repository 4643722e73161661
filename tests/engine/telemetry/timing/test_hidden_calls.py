"""When calls of context parallelism are over: gloo's, those that are carried through host memory, and a device's."""

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.telemetry.timing.test_marks import Device
from tests.harness import run_ranks
from tests.parity.cases import Case, build_rank
from triaxis.engine.comm.backends import Pending
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.comm.staging import Staging, TensorUse
from triaxis.engine.comm.topology import Topology
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.timing.clocks import HostClock
from triaxis.engine.telemetry.timing.marks import MarkedStep, TimeMarks

CPU = torch.device("cpu")
F0 = Action(Kind.F, 0, 0)
PURPOSE = "keys and values forward"


def begun(clock: Any) -> TimeMarks:
    marks = TimeMarks(clock)
    marks.begin(1, is_marked=True)
    marks.enter(StepPart.FORWARD_BACKWARD)
    marks.instruction(F0)
    return marks


def ended(marks: TimeMarks) -> MarkedStep:
    marks.end_step(next_is_marked=False)
    step = marks.take(2)
    assert step is not None
    return step


def post_two_gathers(rank: int, flag: Path) -> tuple[list[tuple[float, float]], list[float]]:
    """Rank 1 posts the first call once rank 0 has worked beside it; rank 0 works on after the second one is over."""
    marks = begun(HostClock())
    topology = Topology(RankGrid(ParallelSizes(tp=1, cp=2, pp=1, dp=1)), rank, CPU).observed([marks])
    cp = topology.axis("cp")
    mine, worked = torch.zeros(4), []

    def work(seconds: float, is_enough: Callable[[], bool] = lambda: True) -> None:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds or not is_enough():
            time.sleep(0.001)
        worked.append(time.perf_counter() - start)

    if rank == 1:
        work(0.0, flag.exists)
    first = cp.all_gather(mine, PURPOSE)
    if rank == 0:
        work(0.05)
        flag.touch()
    first.wait()
    second = cp.all_gather(mine, PURPOSE)
    work(0.0, lambda: second.completed)
    work(0.2)
    second.wait()
    step = ended(marks)
    return step.calls_elapsed(marks.clock), worked


def test_a_call_of_gloo_ends_when_its_result_is_there(tmp_path: Path) -> None:
    (calls, (first_work, until_over, later)), _ = run_ranks(post_two_gathers, 2, tmp_path / "flag")
    (start, stop), (second_start, second_stop) = calls
    assert stop - start >= first_work >= 0.05, "under way while rank 1 has not posted it"
    assert second_start >= stop
    assert second_stop - second_start <= until_over + 0.01 < later, "what is computed after its end hides nothing"


def followed_step(rank: int) -> tuple[list[tuple[float, float]], list[tuple[float, float]], int, int]:
    """A step of a GPT: when its calls of cp were under way, when this rank waited for one, such calls, and all calls."""
    marks = TimeMarks(HostClock())
    case = Case("qwen", tp=2, cp=2, documents=True, num_layers=2, global_batch_size=2)
    engine, batches = build_rank(rank, case, [marks])
    marks.begin(1, is_marked=True)
    microbatches = batches.next_step()
    marks.enter(StepPart.FORWARD_BACKWARD)
    engine.topology.ledger.reset()
    losses = engine.forward_backward(microbatches)
    posted = engine.topology.ledger.posted
    marks.enter(StepPart.OPTIMIZER)
    engine.update(losses, 1e-3).wait()
    step = ended(marks)
    batches.close()
    spans = zip(step.activities, pairwise(marks.clock.elapsed(step.marks)), strict=True)
    waits = [span for activity, span in spans if activity.wait is not None and activity.wait.axis == "cp"]
    num_calls = sum(event.axis == "cp" for event in posted)
    return step.calls_elapsed(marks.clock), waits, num_calls, len(posted)


def test_each_call_of_a_step_is_followed_from_its_post_to_its_end() -> None:
    for calls, waits, num_calls, num_all in run_ranks(followed_step, 4):
        assert num_all > num_calls == len(calls) == len(waits) > 0
        assert calls == sorted(calls), "in the order of their posts"
        # A wait ends behind its call, in whatever order they are waited for; gloo's sum in rank order is between them.
        over, waited = (sorted(stop for _, stop in spans) for spans in (calls, waits))
        assert all(stop <= later for stop, later in zip(over, waited, strict=True))


class Reached:
    """A call of a device with streams: its callback runs at once, where a stream waits for the call (`Work.get_future`)."""

    def __init__(self, device: Device, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def get_future(self) -> "Reached":
        return self

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.device.seconds += self.seconds
        callback(self)
        self.device.seconds -= self.seconds

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize(("axis", "calls"), [("cp", [(1.0, 5.0)]), ("tp", [])])
def test_on_a_stream_the_end_is_an_event_behind_the_call(axis: str, calls: list[tuple[float, float]]) -> None:
    device = Device()
    clock = device.clock()
    marks = begun(clock)
    device.work(1.0)
    ledger = Ledger([marks])
    posted = ledger.post("all_gather", axis, PURPOSE, torch.zeros(1), 2)
    pending = Pending(torch.zeros(1), [Reached(device, 4.0)], written=(ledger, posted))
    device.work(8.0)
    pending.wait()
    step = ended(marks)
    assert step.calls_elapsed(clock) == calls
    # Nothing is waited for but the last event of the step.
    assert not any(mark.is_awaited for call in step.calls for mark in (call.posted, *call.over))


def test_calls_of_validations_are_not_followed() -> None:
    marks = begun(HostClock())
    marks.enter(StepPart.VALIDATION)
    ledger = Ledger([marks])
    posted = ledger.post("all_gather", "cp", PURPOSE, torch.zeros(1), 2)
    Pending(torch.zeros(1), [Instant()], written=(ledger, posted))
    assert ended(marks).calls == []


class Instant:
    """A handle whose call is over."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


def test_a_call_through_host_memory_ends_with_its_wait() -> None:
    """Its tensors are on their device then."""
    tensor = torch.zeros(4)
    staging = Staging(CPU)

    def copied(seen: Any) -> list[Instant]:
        seen(tensor).fill_(3.0)
        return [Instant()]

    (work,) = staging.post(copied, [TensorUse(written=[tensor])])
    seen: list[float] = []
    work.get_future().add_done_callback(lambda _: seen.append(float(tensor[0])))  # type: ignore[attr-defined]
    assert seen == []
    work.wait()
    work.wait()
    staging.close()
    assert seen == [3.0]
