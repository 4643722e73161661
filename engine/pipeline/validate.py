"""Proves that a schedule, or a lowered program, runs to its end (no torch here).

**A schedule** is complete: per stage and microbatch one F, then one B, or one I and later one W; nothing else. And it can
be ordered: run rank by rank, no action waits for ever for the one that feeds it.

**A program** moreover sends what is needed, once, after it exists, and receives it, once, before it is needed; and it runs
to its end under the rules of `engine.pipeline.rendezvous`, which are NCCL's and not gloo's.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from engine.errors import ScheduleError
from engine.pipeline.actions import Action, Kind, Schedule
from engine.pipeline.lowering import Direction, Post, Program, Transfer, feeding_transfer
from engine.pipeline.rendezvous import Place, execute
from engine.pipeline.text import instruction_tokens, pointed_rows, post_token


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found out about a schedule that is right; one entry per rank.

    Attributes:
        peak_in_flight: most microbatch-chunks whose F has started and whose B (or I) has not ended; 0 where no backward comes.
        peak_early_receives: most receives of one direction and chunk that are posted while an action runs and feed a later
            one: buffers beside those in flight. 0 for a schedule that is not lowered.
        num_transfers: sends and receives of the rank; 0 for a schedule that is not lowered.
    """

    peak_in_flight: tuple[int, ...]
    peak_early_receives: tuple[int, ...]
    num_transfers: tuple[int, ...]


def check(subject: Schedule | Program) -> Report:
    """Prove a schedule or a program right.

    Raises:
        ScheduleError: it is incomplete, out of order, or would deadlock; the message shows the rows with an arrow at the place.
    """
    program = subject if isinstance(subject, Program) else Program(subject, subject.actions)
    checker = _Checker(program, is_lowered=isinstance(subject, Program))
    checker.check_actions()
    if checker.is_lowered:
        checker.check_transfers()
    checker.execute()
    ranks = range(len(program.instructions))
    return Report(
        tuple(checker.peak_in_flight(rank) for rank in ranks),
        tuple(checker.peak_early_receives(rank) for rank in ranks),
        tuple(sum(len(each.transfers) for each in row if isinstance(each, Post)) for row in program.instructions),
    )


class _Checker:
    """One check; the methods are called in the order of `check`."""

    def __init__(self, program: Program, is_lowered: bool) -> None:
        self.schedule = program.schedule
        self.placement = program.schedule.placement
        self.rows = program.instructions
        self.is_lowered = is_lowered
        self.where: dict[tuple[int, Kind, int], Place] = {}

    def fail(self, problem: str, marks: Mapping[Place, str]) -> NoReturn:
        schedule, placement = self.schedule, self.placement
        rows = [instruction_tokens(rank, row) for rank, row in enumerate(self.rows)]
        raise ScheduleError(
            f"schedule {schedule.name} (pp {placement.pp}, vpp {placement.vpp}, {schedule.num_microbatches} microbatches): "
            f"{problem}\n{pointed_rows(rows, marks)}"
        )

    # --- the actions -----------------------------------------------------------------------------------------------

    def check_actions(self) -> None:
        """Every action belongs here, stands after what it continues, and none is missing."""
        if len(self.rows) != self.placement.pp:
            raise ScheduleError(
                f"schedule {self.schedule.name} has {len(self.rows)} rows for pp {self.placement.pp}: a row per rank. "
                "Ranks without a row would leave the others waiting; give one row per rank."
            )
        for rank, row in enumerate(self.rows):
            actions = [(position, each) for position, each in enumerate(row) if isinstance(each, Action)]
            if self.is_lowered and tuple(action for _, action in actions) != self.schedule.actions[rank]:
                self.fail(
                    f"the actions of rank {rank} are not those of the schedule, so what was timed is not what would run. Lower the "
                    "schedule again.",
                    {(rank, len(row)): "this row"},
                )
            for position, action in actions:
                self._check_action(rank, position, action)
            self._check_complete(rank)

    def _check_action(self, rank: int, position: int, action: Action) -> None:
        here = {(rank, position): "here"}
        chunk, microbatch = action.chunk, action.microbatch
        if chunk >= self.placement.vpp or microbatch >= self.schedule.num_microbatches:
            self.fail(
                f"rank {rank} has {action}, but chunks end at {self.placement.vpp - 1} and microbatches at "
                f"{self.schedule.num_microbatches - 1}: there is nothing to compute. Remove it.",
                here,
            )
        if self.schedule.forward_only and action.kind is not Kind.F:
            self.fail(f"rank {rank} has {action} in a forward-only schedule: nothing is kept for it. Remove it.", here)
        seen = {kind: self.where.get((self.placement.stage_of(rank, chunk), kind, microbatch)) for kind in Kind}
        excluded = {
            Kind.F: (Kind.F,),
            Kind.B: (Kind.B, Kind.I, Kind.W),
            Kind.I: (Kind.B, Kind.I),
            Kind.W: (Kind.B, Kind.W),
        }
        for kind in excluded[action.kind]:
            place = seen[kind]
            if place is not None:
                self.fail(
                    f"rank {rank} runs {action} after {self.rows[rank][place[1]]}: gradients would count twice, or activations be "
                    "overwritten. Each microbatch has one F, then one B, or one I and one W.",
                    {place: "first", (rank, position): "again"},
                )
        before = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}.get(action.kind)
        if before is not None and seen[before] is None:
            self.fail(
                f"rank {rank} runs {action} before {Action(before, chunk, microbatch)}, which makes what it works on. "
                "Move it behind.",
                here,
            )
        self.where[self.placement.stage_of(rank, chunk), action.kind, microbatch] = (rank, position)

    def _check_complete(self, rank: int) -> None:
        for chunk in range(self.placement.vpp):
            stage = self.placement.stage_of(rank, chunk)
            for microbatch in range(self.schedule.num_microbatches):
                missing = None
                if (stage, Kind.F, microbatch) not in self.where:
                    missing = Kind.F
                elif not self.schedule.forward_only and (stage, Kind.B, microbatch) not in self.where:
                    has_input_grad = (stage, Kind.I, microbatch) in self.where
                    if not has_input_grad:
                        missing = Kind.B
                    elif (stage, Kind.W, microbatch) not in self.where:
                        missing = Kind.W
                if missing is not None:
                    self.fail(
                        f"rank {rank} never runs {Action(missing, chunk, microbatch)}: the loss or its gradient would lack a part, "
                        "or other ranks wait for ever. Add it.",
                        {(rank, len(self.rows[rank])): "missing"},
                    )

    # --- the transfers ---------------------------------------------------------------------------------------------

    def check_transfers(self) -> None:
        """Every needed tensor is sent once, after it exists, and received once, before it is needed; nothing else is."""
        needed = self._needed_transfers()
        posted: dict[tuple[int, Transfer], Place] = {}
        for rank, row in enumerate(self.rows):
            for position, each in enumerate(row):
                if not isinstance(each, Post):
                    continue
                for transfer in each.transfers:
                    self._check_transfer(rank, position, each, transfer, needed, posted)
                    posted[rank, transfer] = (rank, position)
        for transfer, (producer, consumer) in needed.items():
            for rank, word in ((transfer.source, "sent"), (transfer.destination, "received")):
                if (rank, transfer) not in posted:
                    other = posted.get((transfer.source + transfer.destination - rank, transfer))
                    marks = {producer: "makes it", consumer: "needs it"}
                    self.fail(
                        f"the {transfer} is never {word} by rank {rank}: "
                        f"{'its peer waits for ever' if other else 'the action that needs it waits for ever'}. Add it to a post.",
                        marks | ({other: "its other end"} if other else {}),
                    )

    def _needed_transfers(self) -> dict[Transfer, tuple[Place, Place]]:
        """What must go between ranks, with the places of its producer and its consumer."""
        needed = {}
        for (stage, kind, microbatch), consumer in self.where.items():
            action = Action(kind, self.placement.chunk_of(stage), microbatch)
            transfer = feeding_transfer(self.schedule, consumer[0], action)
            source = self.schedule.producer(stage, action)
            if transfer is not None and source is not None:
                needed[transfer] = (self._producer_place(source, microbatch), consumer)
        return needed

    def _producer_place(self, source: tuple[int, Kind], microbatch: int) -> Place:
        stage, kind = source
        place = self.where.get((stage, kind, microbatch))
        return place if place is not None else self.where[stage, Kind.I, microbatch]

    def _check_transfer(
        self,
        rank: int,
        position: int,
        post: Post,
        transfer: Transfer,
        needed: Mapping[Transfer, tuple[Place, Place]],
        posted: Mapping[tuple[int, Transfer], Place],
    ) -> None:
        here = (rank, position)
        if (
            transfer.direction != post.direction
            or transfer not in needed
            or rank not in (transfer.source, transfer.destination)
        ):
            self.fail(
                f"rank {rank} posts {post_token(rank, post)} on the {post.direction} group, where the {transfer} has no "
                "place: no stage hands it over that way. It would take the place of another message. Remove it.",
                {here: "here"},
            )
        if (rank, transfer) in posted:
            self.fail(
                f"rank {rank} posts the {transfer} twice: the second would take the place of another message. Remove one.",
                {posted[rank, transfer]: "first", here: "again"},
            )
        producer, consumer = needed[transfer]
        if rank == transfer.source and position < producer[1]:
            self.fail(
                f"rank {rank} sends the {transfer} before it is made: the peer would get memory without content. Post it later.",
                {here: "sent", producer: "made"},
            )
        if rank == transfer.destination and position > consumer[1]:
            self.fail(
                f"rank {rank} receives the {transfer} after the action that needs it, which waits for ever. Post it earlier.",
                {consumer: "needs it", here: "received"},
            )

    # --- the execution ---------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """Run to the end; the rules are told in `engine.pipeline.rendezvous`."""
        failure = execute(self.schedule, self.rows, self.is_lowered)
        if failure is not None:
            self.fail(failure.problem, failure.marks)

    # --- what it takes ---------------------------------------------------------------------------------------------

    def peak_in_flight(self, rank: int) -> int:
        if self.schedule.forward_only:
            return 0
        now = peak = 0
        for each in self.rows[rank]:
            if isinstance(each, Action):
                now += each.kind is Kind.F
                peak = max(peak, now)
                now -= each.kind in (Kind.B, Kind.I)
        return peak

    def peak_early_receives(self, rank: int) -> int:
        peak = 0
        early: Counter[tuple[Direction, int]] = Counter()
        for each in self.rows[rank]:
            if isinstance(each, Post):
                early.update(
                    (t.direction, self.placement.chunk_of(t.stage)) for t in each.transfers if t.destination == rank
                )
                continue
            feeding = feeding_transfer(self.schedule, rank, each)
            if feeding is not None and self.is_lowered:
                early[feeding.direction, each.chunk] -= 1
            peak = max(peak, *early.values(), 0)
        return peak
