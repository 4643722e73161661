"""Cut a short step into parts, and add up a longer step from them.

A short step has few microbatches. Each pipeline instruction in it is a part, with its calls, operators and live bytes:

    start | 0F0 | send | 0F1 | send, receive | 0B0 | ... | finish | update

An instruction's work depends on a few facts about it, its `Likeness`:

    action        kind, chunk, and whether the microbatch is the chunk's first or last
    group call    its sends and receives, and the number of sends in the group call before it

With ZeRO-2, buckets share memory for main grads, so a backward action also waits for reduce-scatters of earlier ones. Its
`Likeness` then has the earlier backward actions' kinds, chunks and order too. It is an error if parts with equal facts differ in
their work. A longer step's calls and operators are sums over its parts. Its peak is the largest sum of live bytes at a part's
beginning and the part's growth.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from triaxis.engine.comm.ledger import Event, Ledger
from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline.actions import Action, Kind, Schedule
from triaxis.engine.pipeline.lowering import Instruction, Post, Program, Transfer, feeding_transfer
from triaxis.launch.footprint.memory import Extremes, MemoryKind, MemoryWatch, NewTensor, Peak

Likeness = tuple[Any, ...]
"""Facts about an instruction; on one rank (or on equal stages), instructions with equal facts do equal work."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Names the call that a part waits for, without absolute positions in the step.

    So the same `Wait` fits a step with more microbatches. `of` says where the call was posted:

    - own: call number `call` in the part that waits
    - fed: the receive whose data the part's action uses
    - before: call number `call` in an earlier action with (kind, chunk) `action`; `distance` such actions ran between
    - end: call number `call` in the part that is `distance` parts before `finish`
    """

    of: Literal["own", "fed", "before", "end"]
    call: int = 0
    distance: int = 0
    action: tuple[Kind, int] | None = None


@dataclass(frozen=True)
class InstructionCost:
    """Calls, operators and memory of one instruction.

    Attributes:
        calls: posts and waits, in order; posts are numbered from 0.
        ops: number of dispatches of each operator, by (place in the model, name).
        change: bytes by kind at the part's end, less those at its beginning.
        most: peak bytes of each kind that grew, less the kind's live bytes at the part's beginning.
        peak: live bytes when they were most, by kind, less those at the part's beginning; measured when a storage is created.
            None: no storage was created.
        largest: largest tensor created; None: no tensor was created.
    """

    calls: tuple[Event | Wait, ...]
    ops: Counter[tuple[str, str]]
    change: dict[MemoryKind, int]
    most: dict[MemoryKind, int]
    peak: Peak | None
    largest: NewTensor | None


@dataclass
class Total:
    """A whole step, added up from recorded parts.

    Attributes:
        log: the step's posts and waits of calls, in order.
        extremes: the step's peak bytes and operator counts.
    """

    log: list[Event] = field(default_factory=list)
    extremes: Extremes = field(default_factory=Extremes)


class Recorder:
    """An executor's `observer` that records each pipeline instruction's calls and memory as a part.

    Args:
        watch: the rank's entered memory watch; `forget_peak` was just called.
        ledger: the topology's ledger.
        program, rank: the program, and the pp rank whose instructions run.
    """

    def __init__(self, watch: MemoryWatch, ledger: Ledger, program: Program, rank: int) -> None:
        self.watch = watch
        self.ledger = ledger
        self.program = program
        self.rank = rank
        self.row = program.instructions[rank]
        self.start = Counter(watch.live)
        self.update_start = Counter(watch.live)
        self.parts: list[InstructionCost] = []
        self._begin = Counter(watch.live)
        self._num_events = 0
        self._where: dict[int, tuple[int, int]] = {}

    def __call__(self, instruction: Instruction | None) -> None:
        """End the previous instruction's part before an instruction runs. None: all instructions have run."""
        self._end_part()
        self.watch.phase = "gradients" if instruction is None else "pipeline"

    def begin_update(self) -> None:
        """End the step's part `finish`, the work after the last instruction. Call this when gradients are complete."""
        self._end_part()
        self.update_start = Counter(self.watch.live)

    def end(self) -> None:
        """End the step's last part, `update`. Call this after the optimizer's update and its all-gathers."""
        self._end_part()

    def _end_part(self) -> None:
        extremes, begin = self.watch.part, self._begin
        peak = extremes.peak
        if peak is not None:
            peak = Peak(_difference(peak.by_kind, begin), peak.site)
        self.parts.append(
            InstructionCost(
                calls=self._calls(),
                ops=extremes.ops,
                change=_difference(self.watch.live, begin),
                most={kind: most - begin[kind] for kind, most in extremes.most.items()},
                peak=peak,
                largest=extremes.largest,
            )
        )
        self._begin = Counter(self.watch.live)
        self.watch.begin_part()

    def _calls(self) -> tuple[Event | Wait, ...]:
        number = len(self.parts)
        calls: list[Event | Wait] = []
        num_posts = 0
        for event in self.ledger.events[self._num_events :]:
            if event.phase == "post":
                self._where[event.call] = (number, num_posts)
                calls.append(event._replace(call=num_posts, group_call=num_posts - (event.call - event.group_call)))
                num_posts += 1
            elif event.phase == "wait":
                calls.append(self._wait(number, *self._where[event.call]))
        self._num_events = len(self.ledger.events)
        return tuple(calls)

    def _wait(self, number: int, posted_in: int, call: int) -> Wait:
        if posted_in == number:
            return Wait("own", call)
        # Part 0 precedes the row, so part n is instruction n - 1.
        if number <= len(self.row):
            transfer = feeding_transfer_of(self.program.schedule, self.rank, self.row[number - 1])
            post = self.row[posted_in - 1]
            if isinstance(post, Action):
                actions = [each for each in self.row[posted_in : number - 1] if isinstance(each, Action)]
                return Wait("before", call, sum(each[:2] == post[:2] for each in actions), post[:2])
            assert transfer is not None and post.transfers[call] == transfer, (
                f"{self.row[number - 1]} waits for a call of another instruction that does not feed it"
            )
            return Wait("fed")
        return Wait("end", call, len(self.row) + 1 - posted_in)


def feeding_transfer_of(schedule: Schedule, rank: int, instruction: Instruction) -> Transfer | None:
    """Return the transfer that an action waits for. None: the instruction is no action, or needs no transfer."""
    return None if isinstance(instruction, Post) else feeding_transfer(schedule, rank, instruction)


def likenesses(program: Program, rank: int, *, has_slots: bool = False) -> list[Likeness]:
    """List the facts that decide each instruction's work, for pp rank `rank`. `has_slots`: buckets share main grads (ZeRO-2)."""
    last = program.schedule.num_microbatches - 1
    found: list[Likeness] = []
    counts: dict[tuple[Kind, int], int] = {}
    sends_before = 0
    for each in program.instructions[rank]:
        if isinstance(each, Post):
            is_send = tuple(transfer.source == rank for transfer in each.transfers)
            found.append((each.direction, is_send, sends_before))
            sends_before = sum(is_send)
        else:
            users = tuple(counts.items()) if has_slots and each.kind != Kind.F else ()
            found.append((each.kind, each.chunk, each.microbatch == 0, each.microbatch == last, users))
            if each.kind in (Kind.B, Kind.W):
                # The newest user comes last. The first sum of a bucket overwrites, all later ones are added.
                counts[each[:2]] = min(2, counts.pop(each[:2], 0) + 1)
    return found


def covers(short: Iterable[Likeness], long: Iterable[Likeness]) -> bool:
    """Whether each instruction of the long step has an equal one in the short step.

    `short`, `long`: likenesses of a step with few microbatches and of the whole step. A likeness that occurs twice or more in
    `long` must occur at least twice in `short`.
    """
    have = Counter(short)
    return all(have[likeness] >= min(count, 2) for likeness, count in Counter(long).items())


@dataclass
class PartBook:
    """Recorded parts of a short step, for adding up longer steps. A part has one instruction's calls and memory.

    Attributes:
        live_at_start, live_at_update: live bytes when the step and its update begin.
        start, finish, update: parts outside the pipeline's instructions.
        by_likeness: the instructions' parts; instructions with equal `Likeness` share one.
        has_slots: whether buckets share main grads (ZeRO-2).
    """

    live_at_start: Counter[MemoryKind]
    live_at_update: Counter[MemoryKind]
    start: InstructionCost
    finish: InstructionCost
    update: InstructionCost
    by_likeness: dict[Likeness, InstructionCost]
    has_slots: bool

    @classmethod
    def of(cls, recorder: Recorder, *, has_slots: bool) -> "PartBook":
        """Collect the parts of a step that ran.

        Raises:
            ScheduleError: two instructions are alike and did different work.
        """
        program = recorder.program
        start, *parts, finish, update = recorder.parts
        by_likeness: dict[Likeness, InstructionCost] = {}
        alike = likenesses(program, recorder.rank, has_slots=has_slots)
        for likeness, part, each in zip(alike, parts, recorder.row, strict=True):
            if by_likeness.setdefault(likeness, part) != part:
                raise ScheduleError(
                    f"pp rank {recorder.rank}: {each} did not cost what an earlier instruction of its kind did "
                    f"({likeness}), so {program.schedule.num_microbatches} microbatches cannot stand for a longer "
                    "step: bytes, calls or peaks would be wrong. Run all microbatches (--full), and report the "
                    "configuration."
                )
        return cls(recorder.start, recorder.update_start, start, finish, update, by_likeness, has_slots)

    def covers(self, program: Program, rank: int) -> bool:
        """Whether each instruction of pp rank `rank` has a recorded one with equal `Likeness`."""
        return all(each in self.by_likeness for each in likenesses(program, rank, has_slots=self.has_slots))

    def add_up(self, program: Program, rank: int) -> Total:
        """Sum the calls, operators and memory of pp rank `rank`'s step from the recorded parts.

        The rank that was recorded must have equal stages.
        """
        return _Sum(self, program, rank).total()


class _Sum:
    """Sums the recorded instructions' calls, operators and memory over one pp rank's step."""

    def __init__(self, book: PartBook, program: Program, rank: int) -> None:
        self.book = book
        self.schedule = program.schedule
        self.rank = rank
        self.row = program.instructions[rank]
        self.likenesses = likenesses(program, rank, has_slots=book.has_slots)
        self.live = Counter(book.live_at_start)
        self.sum = Total(extremes=Extremes(dict(self.live), Peak(dict(self.live), "")))
        self.posted: list[Event] = []
        self.first_call: list[int] = []
        self.received: dict[Transfer, int] = {}
        self.actions: dict[tuple[Kind, int], list[int]] = {}

    def total(self) -> Total:
        self._add(self.book.start, None)
        uses: Counter[Likeness] = Counter()
        for each, likeness in zip(self.row, self.likenesses, strict=True):
            uses[likeness] += 1
            self._add(self.book.by_likeness[likeness], each)
        self._add(self.book.finish, None)
        self.live = Counter(self.book.live_at_update)
        self._add(self.book.update, None)
        ops = self.sum.extremes.ops
        for part in (self.book.start, self.book.finish, self.book.update):
            ops.update(part.ops)
        for likeness, times in uses.items():
            for name, count in self.book.by_likeness[likeness].ops.items():
                ops[name] += count * times
        return self.sum

    def _add(self, part: InstructionCost, instruction: Instruction | None) -> None:
        first = len(self.posted)
        self.first_call.append(first)
        for call in part.calls:
            if isinstance(call, Event):
                number = len(self.posted)
                event = call._replace(call=number, group_call=first + call.group_call)
                if isinstance(instruction, Post):
                    transfer = instruction.transfers[call.call]
                    is_send = transfer.source == self.rank
                    event = event._replace(peer=transfer.destination if is_send else transfer.source)
                    if not is_send:
                        self.received[transfer] = number
                self.posted.append(event)
                self.sum.log.append(event)
            else:
                self.sum.log.append(self.posted[self._call(call, instruction, first)]._replace(phase="wait"))
        if isinstance(instruction, Action):
            self.actions.setdefault(instruction[:2], []).append(first)
        extremes, live = self.sum.extremes, self.live
        for kind, above in part.most.items():
            extremes.most[kind] = max(extremes.most.get(kind, 0), live[kind] + above)
        assert extremes.peak is not None
        if part.peak is not None and sum(live.values()) + part.peak.total > extremes.peak.total:
            kinds = live.keys() | part.peak.by_kind.keys()
            extremes.peak = Peak({kind: live[kind] + part.peak.by_kind.get(kind, 0) for kind in kinds}, part.peak.site)
        if part.largest is not None and (
            extremes.largest is None or part.largest.num_bytes > extremes.largest.num_bytes
        ):
            extremes.largest = part.largest
        for kind, change in part.change.items():
            live[kind] += change

    def _call(self, wait: Wait, instruction: Instruction | None, first: int) -> int:
        """Return the awaited call's index in `self.posted`. `first` is the index of the waiting part's first post."""
        if wait.of == "own":
            return first + wait.call
        if wait.of == "end":
            return self.first_call[len(self.row) + 1 - wait.distance] + wait.call
        if wait.of == "before":
            assert wait.action is not None
            return self.actions[wait.action][-1 - wait.distance] + wait.call
        assert instruction is not None
        transfer = feeding_transfer_of(self.schedule, self.rank, instruction)
        assert transfer is not None
        return self.received[transfer]


def _difference(after: Any, before: Any) -> dict[MemoryKind, int]:
    """Return after - before, for each kind that differs."""
    changed = {kind: after.get(kind, 0) - before.get(kind, 0) for kind in after.keys() | before.keys()}
    return {kind: change for kind, change in changed.items() if change}
