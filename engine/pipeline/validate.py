"""Proves that a schedule or a lowered program runs to its end.

**A schedule** has for each stage and microbatch one forward F, and later one backward B. Instead of B, it may have an I (input
gradient) and a later W (weight gradients). A forward-only schedule has the F alone. When each rank runs its actions in turn, no
rank waits for ever.

**A program** also sends and receives each needed tensor once, and in time. Any two ranks group their common transfers alike. The
program ends under NCCL's rules in `triaxis.engine.pipeline.rendezvous`, with one hardware queue. At first, only connections between
ring neighbours are open. A program with late receives ends even if every action waits for the whole device.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline.actions import Action, Kind, Schedule
from triaxis.engine.pipeline.lowering import Direction, Post, Program, Receives, Transfer, feeding_transfer
from triaxis.engine.pipeline.rendezvous import (
    Call,
    Conflict,
    Connection,
    MessageEnd,
    Place,
    Rules,
    Step,
    Stuck,
    execute,
)
from triaxis.engine.pipeline.text import instruction_tokens, pointed_rows, post_token


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """Facts about a valid schedule; one entry per rank.

    Attributes:
        peak_in_flight: largest number of microbatch-chunks whose F has started and whose B (or I) has not ended. 0 in a
            forward-only schedule.
        peak_held: largest number of microbatch-chunks whose I has ended and whose W has not.
        peak_early_receives: largest number of posted receives in one direction and chunk whose consumer is later than the running
            action. Each needs one more buffer. 0 for a schedule that is not lowered.
        num_transfers: number of the rank's sends and receives; 0 for a schedule that is not lowered.
    """

    peak_in_flight: tuple[int, ...]
    peak_held: tuple[int, ...]
    peak_early_receives: tuple[int, ...]
    num_transfers: tuple[int, ...]


def check(subject: Schedule | Program, opened: Collection[Connection] | None = None) -> ScheduleFacts:
    """Prove a schedule or program complete, in order and free of deadlocks; return its facts.

    Args:
        subject: the schedule or program that would run.
        opened: connections that are open before the first post; None: those that `Topology` opens (`ring_connections`).

    Raises:
        ScheduleError: the subject is incomplete, out of order, would deadlock, or two ranks group their common transfers
            differently. The message shows each rank's actions and calls, with an arrow at the fault.
    """
    program = subject if isinstance(subject, Program) else Program(subject, subject.actions)
    if opened is None:
        opened = ring_connections(program.schedule.placement.pp)
    checker = _Checker(program, isinstance(subject, Program), opened)
    checker.check_actions()
    if checker.is_lowered:
        checker.check_transfers()
    checker.execute()
    if checker.is_lowered:
        checker.check_grouping()
    ranks = range(len(program.instructions))
    return ScheduleFacts(
        tuple(0 if program.schedule.forward_only else checker.peak(rank, Kind.F, Kind.B, Kind.I) for rank in ranks),
        tuple(checker.peak(rank, Kind.I, Kind.W) for rank in ranks),
        tuple(checker.peak_early_receives(rank) for rank in ranks),
        tuple(sum(len(each.transfers) for each in row if isinstance(each, Post)) for row in program.instructions),
    )


def ring_connections(pp: int) -> set[Connection]:
    """List the connections that `Topology` opens before the first step.

    Each rank is connected to its ring neighbours both ways, for activations and for gradients.
    """
    pairs = [(rank, (rank + 1) % pp) for rank in range(pp)] if pp > 1 else []
    directions: tuple[Direction, ...] = ("forward", "backward")
    return {(each, *ends) for each in directions for a, b in pairs for ends in ((a, b), (b, a))}


def rules_for(receives: Receives, opened: Collection[Connection]) -> Rules:
    """Build the worst-case rules under which a program must not deadlock.

    With late receives, each action also waits for all earlier calls on its rank.
    """
    return Rules(opened=opened, steps_synchronize=receives == "late", one_queue=True)


def _explained_rules(receives: Receives, opened: Collection[Connection]) -> list[tuple[Rules, str, str]]:
    """List (rules, cause, remedy), from the most lenient rules to the strictest.

    Cause and remedy explain a deadlock that occurs under these rules, but under none of the earlier ones.
    """
    explained = [
        (
            Rules(),
            "posts that no peer meets hold up all later ones",
            "Post what happens at one point as one group call, and in one order on all ranks (`lower` does).",
        ),
        (
            Rules(opened=opened),
            "the first use of a connection that is not open holds the host until the peer makes the mirrored call",
            "Send to ring neighbours only: their connections are open before the first step.",
        ),
        (
            Rules(opened=opened, one_queue=True),
            "streams that share a hardware queue launch nothing behind a post that has not started",
            "Post each transfer after what must have completed before it, on both ranks.",
        ),
    ]
    if receives == "late":
        explained.append(
            (
                rules_for(receives, opened),
                "an action that waits for the whole device also waits for posts that are met only after it",
                "Post each receive right before the action that needs it.",
            )
        )
    return explained


def _by_peer(rank: int, transfers: Sequence[Transfer]) -> list[frozenset[Transfer]]:
    """Group a call's transfers by the peer of `rank`. Peers with a single transfer are left out."""
    peers: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        peers.setdefault(transfer.source + transfer.destination - rank, []).append(transfer)
    return [frozenset(each) for each in peers.values() if len(each) > 1]


class _Checker:
    """Checks one schedule or program. A failed check raises `ScheduleError`, which shows the rows."""

    def __init__(self, program: Program, is_lowered: bool, opened: Collection[Connection]) -> None:
        self.schedule = program.schedule
        self.placement = program.schedule.placement
        self.rows = program.instructions
        self.is_lowered = is_lowered
        self.receives = program.receives
        self.opened = opened
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
        """Check that each action occurs once, with B or I after F, and W after I.

        Also check that there is one row per rank, and that a program has its schedule's actions. Record each action's position.
        """
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
        """Check that exactly the needed tensors are sent and received, once and in time."""
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
        """Map each needed transfer to the positions of the producing and the consuming action."""
        needed = {}
        for (stage, kind, microbatch), consumer in self.where.items():
            action = Action(kind, self.placement.chunk_of(stage), microbatch)
            transfer = feeding_transfer(self.schedule, consumer[0], action)
            source = self.schedule.input_of(stage, action)
            if transfer is not None and source is not None:
                producer = self.where.get(source) or self.where[source.stage, Kind.I, source.microbatch]
                needed[transfer] = (producer, consumer)
        return needed

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

    # --- the grouping ----------------------------------------------------------------------------------------------

    def check_grouping(self) -> None:
        """Check that transfers between two ranks share a call on both ranks or on neither."""
        # Only calls with several transfers between one pair can be grouped differently at the other end.
        grouped: dict[tuple[int, frozenset[Transfer]], Place] = {}
        for rank, row in enumerate(self.rows):
            for position, each in enumerate(row):
                if isinstance(each, Post) and len(each.transfers) > 1:
                    for transfers in _by_peer(rank, each.transfers):
                        grouped[rank, transfers] = (rank, position)
        for (rank, transfers), place in grouped.items():
            example = next(iter(transfers))
            peer = example.source + example.destination - rank
            if (peer, transfers) not in grouped:
                self.fail(
                    f"rank {rank} groups {len(transfers)} transfers with rank {peer} in one call on the {example.direction} group, "
                    f"and rank {peer} does not: NCCL does not define what happens then. Group a pair's transfers alike at both "
                    "ends (`lower` does).",
                    {place: "here"},
                )

    # --- the execution ---------------------------------------------------------------------------------------------

    def execute(self) -> None:
        """Execute the program under all its rules, and fail if it does not end.

        After a failure, find its cause by executions under fewer rules, the most lenient first.
        """
        rows = {rank: self._row(rank) for rank in range(len(self.rows))}
        if not self.is_lowered:
            if isinstance(failure := execute(rows, {}), Stuck):
                cause = "the actions of several ranks wait for each other in a circle"
                self._fail_stuck(failure, cause, "Order the actions so that each comes after what it needs.")
            return
        if execute(rows, {}, rules_for(self.receives, self.opened)) is None:
            return
        for rules, cause, remedy in _explained_rules(self.receives, self.opened):
            failure = execute(rows, {}, rules)
            if isinstance(failure, Stuck):
                self._fail_stuck(failure, cause, remedy)
            elif failure is not None:
                self._fail_conflict(failure)

    def _row(self, rank: int) -> list[Call | Step]:
        """Translate a rank's instructions into calls and steps, which `rendezvous.execute` runs."""
        received_by: dict[Transfer, int] = {}
        row: list[Call | Step] = []
        for position, each in enumerate(self.rows[rank]):
            if isinstance(each, Post):
                row.append(Call(each.direction, tuple(MessageEnd(t.source, t.destination, t) for t in each.transfers)))
                received_by.update((t, position) for t in each.transfers if t.destination == rank)
                continue
            stage = self.placement.stage_of(rank, each.chunk)
            makes = self.schedule.output_of(stage, each)
            feeding = feeding_transfer(self.schedule, rank, each) if self.is_lowered else None
            if feeding is not None:
                row.append(Step((received_by[feeding],), makes=makes))
            else:
                row.append(Step((), self.schedule.input_of(stage, each), makes))
        return row

    def _fail_stuck(self, stuck: Stuck, cause: str, remedy: str) -> NoReturn:
        marks = dict.fromkeys(stuck.stopped, "waits for ever")
        for head in stuck.heads:
            waiting = ", ".join(str(message.content) for message in head.open)
            marks[head.place] = f"is not met, and holds up all posts behind it: {waiting}"
        self.fail(f"deadlock: {cause}. Every rank would hang until the timeout. {remedy}", marks)

    def _fail_conflict(self, conflict: Conflict) -> NoReturn:
        if conflict.reason == "connections":
            self.fail(
                f"rank {conflict.first[0]} and rank {conflict.second[0]} would open different connections in the first calls that "
                "name both: NCCL hangs, or reads memory that is not mapped. Open both directions of a pair before the first "
                "post (`Topology` does between ring neighbours).",
                {conflict.first: "opens", conflict.second: "opens others"},
            )
        assert isinstance(conflict.ours, Transfer)
        transfer = conflict.ours
        self.fail(
            f"the next message from rank {transfer.source} to rank {transfer.destination} on the {transfer.direction} group is one "
            "thing to its sender and another to its receiver: they post in different orders, and there are no tags. "
            "A stage would compute on another microbatch's data. Post in one order on both ranks.",
            {conflict.first: str(conflict.ours), conflict.second: str(conflict.theirs)},
        )

    # --- what it takes ---------------------------------------------------------------------------------------------

    def peak(self, rank: int, begins: Kind, *ends: Kind) -> int:
        """Count the most microbatch-chunks that an action `begins` has opened and none of `ends` has closed."""
        now = peak = 0
        for each in self.rows[rank]:
            if isinstance(each, Action):
                now += each.kind is begins
                peak = max(peak, now)
                now -= each.kind in ends
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
