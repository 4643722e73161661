"""Executes a program without devices, under rules stricter than NCCL's and much stricter than gloo's (no torch here).

    channel      (direction, rank): one FIFO of posts. PyTorch runs the grouped point-to-point calls of a process group on
                 one stream, so a post waits for the one before it even where their peers differ. What runs under this
                 rule runs where the FIFO is per pair of ranks, too.
    rendezvous   a send completes only together with its receive. No buffering, not even of one message.
    order        no tags: the k-th send from a to b meets the k-th receive at b from a, whatever they were meant to be.
    group call   the transfers of the post at the head progress together, each with the head of its peer. The post
                 completes as a whole (a backend gives one handle for it), then the next one begins.
    blocked head a post whose peer does not come holds up all behind it.
    action       waits for the whole post of the receive that feeds it, then runs. Posting never waits. Nobody waits for sends.

Whether a program runs to its end under these rules does not depend on timing: what can happen stays possible until it
happens, so one execution decides for all speeds of ranks and links. Two ranks that post a receive and then, in a post of
its own, a send to each other are rejected, although gloo runs them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.pipeline.actions import Action, Kind, Schedule
from engine.pipeline.lowering import Direction, Instruction, Post, Transfer, feeding_transfer

Place = tuple[int, int]
"""(rank, position in its row)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a program does not run to its end, with notes for places in its rows."""

    problem: str
    marks: dict[Place, str]


@dataclass(slots=True)
class _Posted:
    """A post in a channel; `open` are its transfers that have not met their other end."""

    place: Place
    post: Post
    open: list[Transfer] = field(default_factory=list)

    def first_between(self, source: int, destination: int) -> Transfer | None:
        for transfer in self.open:
            if (transfer.source, transfer.destination) == (source, destination):
                return transfer
        return None


def execute(schedule: Schedule, rows: Sequence[Sequence[Instruction]], is_lowered: bool) -> Failure | None:
    """Run all ranks as far as they come.

    Args:
        rows: per rank, complete: each transfer is posted at both its ends.
        is_lowered: False: rows are actions only, and what one produces is everywhere at once.

    Returns:
        None when every action ran and every transfer completed, else what went wrong.
    """
    return _Execution(schedule, rows, is_lowered).run()


class _Execution:
    def __init__(self, schedule: Schedule, rows: Sequence[Sequence[Instruction]], is_lowered: bool) -> None:
        self.schedule = schedule
        self.rows = rows
        self.is_lowered = is_lowered
        self.next_position = [0] * len(rows)
        self.channels: dict[tuple[Direction, int], deque[_Posted]] = {
            (direction, rank): deque() for direction in ("forward", "backward") for rank in range(len(rows))
        }
        self.received: set[Transfer] = set()
        self.produced: set[tuple[int, Kind, int]] = set()
        self.runnable: deque[int] = deque(range(len(rows)))
        self.mismatch: Failure | None = None

    def run(self) -> Failure | None:
        while self.runnable and self.mismatch is None:
            self._advance(self.runnable.popleft())
        if self.mismatch is not None:
            return self.mismatch
        finished = all(position == len(row) for position, row in zip(self.next_position, self.rows, strict=True))
        return None if finished and not any(self.channels.values()) else self._deadlock()

    def _advance(self, rank: int) -> None:
        """Run a rank until an action has to wait."""
        row = self.rows[rank]
        while self.next_position[rank] < len(row) and self.mismatch is None:
            position = self.next_position[rank]
            each = row[position]
            if isinstance(each, Post):
                channel = self.channels[each.direction, rank]
                channel.append(_Posted((rank, position), each, list(each.transfers)))
                self._progress(each.direction, rank)
            elif self._can_run(rank, each):
                self._run_action(rank, each)
            else:
                return
            self.next_position[rank] += 1

    def _can_run(self, rank: int, action: Action) -> bool:
        feeding = feeding_transfer(self.schedule, rank, action) if self.is_lowered else None
        if feeding is not None:
            return feeding in self.received
        source = self.schedule.producer(self.schedule.placement.stage_of(rank, action.chunk), action)
        return source is None or (*source, action.microbatch) in self.produced

    def _run_action(self, rank: int, action: Action) -> None:
        if action.kind is Kind.W:
            return
        placement = self.schedule.placement
        stage = placement.stage_of(rank, action.chunk)
        self.produced.add((stage, Kind.F if action.kind is Kind.F else Kind.B, action.microbatch))
        consumer = stage + 1 if action.kind is Kind.F else stage - 1
        if not self.is_lowered and 0 <= consumer < placement.num_stages:
            self.runnable.append(placement.rank_of(consumer))

    def _progress(self, direction: Direction, rank: int) -> None:
        """Let the head of a channel meet the heads of its peers, and what follows them, as far as it goes."""
        agenda = [rank]
        while agenda and self.mismatch is None:
            at = agenda.pop()
            channel = self.channels[direction, at]
            if not channel:
                continue
            head = channel[0]
            for transfer in tuple(head.open):
                peer = transfer.destination if at == transfer.source else transfer.source
                if self._meet(direction, at, peer, transfer) and not self.channels[direction, peer][0].open:
                    self._complete(direction, peer)
                    agenda.append(peer)
            if not head.open:
                self._complete(direction, at)
                agenda.append(at)

    def _meet(self, direction: Direction, rank: int, peer: int, transfer: Transfer) -> bool:
        """Match a transfer of `rank`'s head with `peer`'s head, by order."""
        mine = self.channels[direction, rank][0]
        if not self.channels[direction, peer]:
            return False
        theirs = self.channels[direction, peer][0]
        if mine.first_between(transfer.source, transfer.destination) is not transfer:
            return False
        other = theirs.first_between(transfer.source, transfer.destination)
        if other is None:
            return False
        if other != transfer:
            self.mismatch = Failure(
                f"the next message from rank {transfer.source} to rank {transfer.destination} on the {direction} group is one "
                f"thing to its sender and another to its receiver: they post in different orders, and there are no tags. "
                "A stage would compute on another microbatch's data. Post in one order on both ranks.",
                {mine.place: str(transfer), theirs.place: str(other)},
            )
            return False
        mine.open.remove(transfer)
        theirs.open.remove(transfer)
        return True

    def _complete(self, direction: Direction, rank: int) -> None:
        posted = self.channels[direction, rank].popleft()
        arrived = [transfer for transfer in posted.post.transfers if transfer.destination == rank]
        if arrived:
            self.received.update(arrived)
            self.runnable.append(rank)

    def _deadlock(self) -> Failure:
        marks: dict[Place, str] = {}
        for rank, position in enumerate(self.next_position):
            if position < len(self.rows[rank]):
                marks[rank, position] = "waits for ever"
        for channel in self.channels.values():
            if channel:
                head = channel[0]
                waiting = ", ".join(str(transfer) for transfer in head.open)
                marks[head.place] = f"is not met, and holds up all posts behind it: {waiting}"
        if self.is_lowered:
            cause = "posts that nobody meets hold up what stands behind them"
            remedy = "Post what happens at one point as one group call, and in one order on all ranks (`lower` does)."
        else:
            cause = "the actions of several ranks wait for each other in a circle"
            remedy = "Order the actions so that each comes after what it needs."
        return Failure(f"deadlock: {cause}. Every rank would hang until the timeout. {remedy}", marks)
