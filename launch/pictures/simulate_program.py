"""Times a lowered program event by event: its actions, its transfers, and each rank's waits.

    rank 0  |  0F0  |  0F1  | ...                      actions run in order; a post takes no time on its rank
    0 -> 1          |---F0---|---F1---|                one transfer at a time goes from one rank to another
    rank 1  |................|  0F0  |  ...            an action waits for its receive; an early receive costs nothing

A post starts a call, a group of transfers that run together. A rank reaches a post when all earlier actions have ended. A transfer
begins when its calls on both ranks run and its channel is free. As under NCCL, a rank's calls in one process group run
one after another. A call ends when all its transfers have ended. So an action may wait for a message other than its own. The
process groups `forward` and `backward` do not wait for each other.

`triaxis.engine.pipeline.simulate` models no posts, calls or channels.
"""

import heapq
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline.actions import Action, Kind, Output
from triaxis.engine.pipeline.lowering import Direction, Post, Program, Transfer, feeding_transfer
from triaxis.engine.pipeline.simulate import Costs, Interval, SimulatedTimeline, check_costs


class Waits(NamedTuple):
    """A rank's idle time by cause, in the unit of the costs.

    Attributes:
        bubble: time in which the next input is not computed yet, or no action is left.
        messages: time in which the next input is computed but has not arrived.
    """

    bubble: float
    messages: float


class PathSegment(NamedTuple):
    """A segment of the critical path.

    Attributes:
        what: action or transfer that runs in this segment.
        rank: the action's rank, or the transfer's source.
        start, end: times in the unit of the costs; the next segment starts at `end`.
    """

    what: Action | Transfer
    rank: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class TransferTime:
    """The times of one transfer.

    Attributes:
        produced: end of the action that computed the tensor.
        start: time at which the transfer begins to use the channel.
        end: time at which the tensor has arrived at the destination.
        ready: end of the receiver's call, after which an action can use the tensor.
    """

    transfer: Transfer
    produced: float
    start: float
    end: float
    ready: float


@dataclass(frozen=True)
class ProgramTimeline(SimulatedTimeline):
    """The intervals of all actions, and the times of all transfers.

    Attributes:
        transfers: transfer times, in the order in which they start.
        waits: each rank's idle time.
        critical_path: chain of segments from time 0 to the last action's end, each of which delayed the next.
    """

    transfers: tuple[TransferTime, ...]
    waits: tuple[Waits, ...]
    critical_path: tuple[PathSegment, ...]


def simulate_program(program: Program, costs: Costs) -> ProgramTimeline:
    """Time every action and every transfer in a program.

    Args:
        program: lowered program, as the executor runs it.
        costs: times for one microbatch's actions and transfers.

    Raises:
        ScheduleError: the costs have another number of stages, a time is negative or not finite, or instructions deadlock.
    """
    check_costs(costs, program.schedule.placement.num_stages)
    times = (*costs.forward, *costs.input_grad, *costs.weight_grad, costs.transfer)
    if wrong := [time for time in times if not 0 <= time < math.inf]:
        raise ScheduleError(
            f"a cost of {wrong[0]}: what ends before it starts, or never, cannot be timed. Give times of 0 or more."
        )
    return _Run(program, costs).run()


@dataclass(slots=True, eq=False)
class _Piece:
    """A timed action on one rank. `cause` is the action or transfer that the action waited for last."""

    what: Action
    rank: int
    start: float
    end: float
    cause: "_Cause"


@dataclass(slots=True, eq=False)
class _Call:
    """A group call on one rank.

    Attributes:
        before, after: previous and next call on the same rank in the same direction.
        reached: time at which the rank posted the call.
        cause: event that the call waited for last, an action on its rank or the last transfer in `before`.
        unfinished: number of the call's transfers that have not ended.
        runs: whether the call was reached and `before` has ended.
        waiting: whether the rank is stopped at an action that needs this call.
        end: time at which the last of the call's transfers ended; None until then.
        last: the transfer that ended last; None until then.
    """

    rank: int
    transfers: tuple[Transfer, ...]
    before: "_Call | None"
    unfinished: int
    reached: float
    cause: "_Cause"
    runs: bool = False
    after: "_Call | None" = None
    waiting: bool = False
    end: float | None = None
    last: "_Moving | None" = None


@dataclass(slots=True, eq=False)
class _Moving:
    """A transfer, the calls at its two ends, and the event that it waited for last."""

    what: Transfer
    calls: list[_Call] = field(default_factory=list)
    start: float = 0
    end: float = 0
    cause: "_Cause" = None

    @property
    def rank(self) -> int:
        return self.what.source


_Cause = _Piece | _Moving | None


class _Run:
    """One simulation of a program, event by event in time order."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.schedule = program.schedule
        pp = self.schedule.placement.pp
        # Per rank: next instruction, time reached, and the action that ended then.
        self.next = [0] * pp
        self.clock = [0.0] * pp
        self.latest: list[_Cause] = [None] * pp
        self.rows: list[list[Interval]] = [[] for _ in range(pp)]
        self.produced: dict[Output, float] = {}
        self.transfers: list[TransferTime] = []
        self.in_messages = [0.0] * pp
        # A transfer enters `moving` when the call at one of its ends runs, and `begun` when the calls at both ends run.
        self.moving: dict[Transfer, _Moving] = {}
        self.begun: list[_Moving] = []
        self.receives: dict[Transfer, _Call] = {}
        self.last_call: dict[tuple[int, Direction], _Call] = {}
        # Per (source, destination): the time at which the channel is free, and its last user.
        self.channel: dict[tuple[int, int], tuple[float, _Moving]] = {}
        self.events: list[tuple[float, int, _Call | _Moving]] = []
        """Queue of (time, serial number, posted call or transfer that ends); the number orders events at the same time."""
        self.num_events = 0

    def run(self) -> ProgramTimeline:
        for rank in range(len(self.rows)):
            self.advance(rank)
        while self.events:
            now, _, subject = heapq.heappop(self.events)
            if isinstance(subject, _Call):
                self.open(subject, now)
            else:
                self.finish(subject, now)
        if stopped := [rank for rank, row in enumerate(self.program.instructions) if self.next[rank] < len(row)]:
            where = ", ".join(
                f"rank {rank} at its instruction {self.next[rank]} ({self.program.instructions[rank][self.next[rank]]})"
                for rank in stopped
            )
            raise ScheduleError(
                f"program {self.schedule.name} deadlocks, so it cannot be timed. Ranks that wait forever: {where}. Run "
                "`check` to see where."
            )
        return self.timeline()

    def advance(self, rank: int) -> None:
        """Run a rank's instructions until an action needs a receive that has not ended."""
        row, placement = self.program.instructions[rank], self.schedule.placement
        while self.next[rank] < len(row):
            each = row[self.next[rank]]
            if isinstance(each, Post):
                self.post(rank, each)
                self.next[rank] += 1
                continue
            stage = placement.stage_of(rank, each.chunk)
            start, cause = self.clock[rank], self.latest[rank]
            feeding = feeding_transfer(self.schedule, rank, each)
            if feeding is not None:
                call = self.receives.get(feeding)
                if call is None:  # its post comes later in this row, so the rank waits forever and `run` reports it
                    return
                if call.end is None:
                    call.waiting = True
                    return
                source = self.schedule.input_of(stage, each)
                assert source is not None
                # Only the time after the input was computed counts as waiting for a message; the time before is bubble.
                self.in_messages[rank] += max(call.end - max(start, self.produced[source]), 0.0)
                if call.end > start:
                    start, cause = call.end, call.last
            end = start + self.costs.of(each.kind, stage)
            self.rows[rank].append(Interval(each, start, end))
            self.clock[rank], self.latest[rank] = end, _Piece(each, rank, start, end, cause)
            if (output := self.schedule.output_of(stage, each)) is not None:
                self.produced[output] = end
            self.next[rank] += 1

    def post(self, rank: int, post: Post) -> None:
        now, before = self.clock[rank], self.last_call.get((rank, post.direction))
        call = _Call(rank, post.transfers, before, len(post.transfers), now, self.latest[rank])
        if before is not None:
            before.after = call
        self.last_call[rank, post.direction] = call
        self.receives.update((transfer, call) for transfer in post.transfers if transfer.destination == rank)
        self.at(now, call)

    def at(self, time: float, subject: _Call | _Moving) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, subject))

    def open(self, call: _Call, now: float) -> None:
        """Start a call if its rank has reached it and the previous call has ended.

        Begin each of its transfers for which the call at the other end runs too.
        """
        if call.runs or call.reached > now or (call.before is not None and call.before.end is None):
            return
        call.runs = True
        if call.before is not None and call.before.end == now and now > call.reached:
            call.cause = call.before.last
        for transfer in call.transfers:
            moving = self.moving.setdefault(transfer, _Moving(transfer))
            moving.calls.append(call)
            if len(moving.calls) == 2:
                self.begin(moving, now, call.cause)

    def begin(self, moving: _Moving, now: float, cause: _Cause) -> None:
        transfer = moving.what
        ends = transfer.source, transfer.destination
        # A busy channel delays the transfer, and its last user becomes the cause on the critical path.
        free, user = self.channel.get(ends, (0.0, None))
        moving.start, moving.cause = (free, user) if free > now else (now, cause)
        moving.end = moving.start + self.costs.transfer
        self.channel[ends] = moving.end, moving
        self.begun.append(moving)
        self.at(moving.end, moving)

    def finish(self, moving: _Moving, now: float) -> None:
        """End a transfer, and each of its two calls that has no other unfinished transfer.

        After a call ends, the next call on its rank may start, and the rank goes on if an action needed the call.
        """
        for call in moving.calls:
            call.unfinished -= 1
            if call.unfinished:
                continue
            call.end, call.last = now, moving
            if call.after is not None:
                self.open(call.after, now)
            if call.waiting:
                call.waiting = False
                self.advance(call.rank)

    def timeline(self) -> ProgramTimeline:
        placement = self.schedule.placement
        transfers = []
        for moving in sorted(self.begun, key=lambda each: each.start):
            transfer = moving.what
            before = transfer.stage + (-1 if transfer.direction == "forward" else 1)
            made = Output(before, Kind.F if transfer.direction == "forward" else Kind.B, transfer.microbatch)
            ready = self.receives[transfer].end
            assert ready is not None
            transfers.append(TransferTime(transfer, self.produced[made], moving.start, moving.end, ready))
        span = max(self.clock)
        waits = []
        for rank in range(placement.pp):
            busy = sum(each.end - each.start for each in self.rows[rank])
            waits.append(Waits(max(span - busy - self.in_messages[rank], 0.0), self.in_messages[rank]))
        return ProgramTimeline(
            self.schedule,
            tuple(map(tuple, self.rows)),
            tuple(transfers),
            tuple(waits),
            _path(self.latest[self.clock.index(span)], span),
        )


def _path(last: _Cause, span: float) -> tuple[PathSegment, ...]:
    """Follow the causes back from `last` to time 0. List the segments in order of time, without those of zero length."""
    segments: list[PathSegment] = []
    until = span
    while last is not None:
        if until > last.start:
            segments.append(PathSegment(last.what, last.rank, last.start, until))
        until, last = last.start, last.cause
    return tuple(reversed(segments))
