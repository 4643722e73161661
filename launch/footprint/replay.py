"""Replay many ranks' recorded communication calls under NCCL's rules, to find mismatches.

The rules in `triaxis.engine.pipeline.rendezvous` are applied to every call:

    communicator   one per group of ranks, shared by axes with the same ranks; a pipeline group has one per direction
    call           a collective, or sends and receives posted together; its ranks must agree on operation, dtype and numel
    wait           blocks its rank until one call has ended
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from triaxis.engine.comm.ledger import Event
from triaxis.engine.errors import ScheduleError, counted
from triaxis.engine.layout.axis_groups import axis_groups
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.pipeline.rendezvous import Call, Conflict, MessageEnd, Place, Row, Step, Stuck, execute

Communicator = tuple[tuple[int, ...], str]
"""Ranks, and the channel that separates a pipeline's two directions."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Matched calls by axis.

    Attributes:
        collectives: number of collectives; each counts once, however many members it has.
        messages: number of messages.
    """

    num_ranks: int
    collectives: dict[str, int]
    messages: dict[str, int]


def replay(
    logs: Mapping[int, Sequence[Event]], grid: RankGrid, kv_heads: int | None, *, has_experts: bool = False
) -> Replayed:
    """Replay some ranks' calls and waits to the end, and count the matched calls.

    Args:
        logs: posts and waits of each rank, in order; events of phase `mark` are ignored. Members of a communicator that have no
            log are assumed to join each call. A pipeline's ranks must all have logs.
        grid: grid of all ranks.
        kv_heads, has_experts: the model's properties, as `Topology` takes them.

    Raises:
        ScheduleError: two ends of a call differ, ranks deadlock, or a rank has no group on a call's axis; the message names ranks
            and calls.
    """
    return _Replay(logs, axis_groups(grid, kv_heads, has_experts=has_experts)).run()


@dataclass(frozen=True, slots=True)
class _Content:
    """The operation, dtype and numel that must be equal at all ranks of one call.

    For a send or a receive, `op` is "", since the call's two ends differ.
    """

    op: str
    dtype: object
    numel: int
    event: Event = field(compare=False)


class _Replay:
    def __init__(
        self, logs: Mapping[int, Sequence[Event]], groups: Iterable[tuple[str, Sequence[tuple[int, ...]], str]]
    ) -> None:
        self.communicators: dict[tuple[int, str], Communicator] = {
            (rank, axis): (ranks, channel)
            for axis, members, channel in groups
            for ranks in members
            for rank in ranks
            if rank in logs
        }
        self.members = {
            communicator: [rank for rank in communicator[0] if rank in logs]
            for communicator in self.communicators.values()
        }
        # By position in a row: the posts in one call, or a wait.
        self.events: dict[Place, list[Event]] = {}
        self.rows = {rank: self._row(rank, log) for rank, log in logs.items()}

    def run(self) -> Replayed:
        failure = execute(self.rows, self.members)
        if failure is not None:
            raise ScheduleError(self._conflict(failure) if isinstance(failure, Conflict) else self._stuck(failure))
        # Everything has matched, so each message is counted at its receiver, and a collective at the first member with a log.
        collectives: Counter[str] = Counter()
        messages: Counter[str] = Counter()
        for (rank, _), events in self.events.items():
            first = events[0]
            if first.phase != "post":
                continue
            if first.peer >= 0:
                messages[first.axis] += sum(event.op == "recv" for event in events)
            elif self.members[self.communicators[rank, first.axis]][0] == rank:
                collectives[first.axis] += 1
        return Replayed(len(self.rows), dict(collectives), dict(messages))

    def _row(self, rank: int, log: Sequence[Event]) -> Row:
        """Translate a rank's log into a row that `rendezvous.execute` simulates.

        Posts in one group call become a `Call`. A wait becomes a `Step`, which blocks the rank until the call ends.
        """
        items: list[list[Event]] = []
        position_of: dict[int, int] = {}
        for event in log:
            if event.phase == "post" and event.group_call in position_of:
                items[position_of[event.group_call]].append(event)
            elif event.phase != "mark":
                items.append([event])
            if event.phase == "post":
                position_of[event.call] = position_of.get(event.group_call, len(items) - 1)
        self.events.update({(rank, position): item for position, item in enumerate(items)})
        return [
            Step((position_of[item[0].call],)) if item[0].phase == "wait" else self._call(rank, item) for item in items
        ]

    def _call(self, rank: int, events: Sequence[Event]) -> Call:
        communicator = self.communicators.get((rank, events[0].axis))
        if communicator is None:
            raise ScheduleError(
                f"rank {rank} called {_words(events[0])} on an axis that it has no group of. No rank would meet it; the ledger "
                "is of another layout, or the call is wrong."
            )
        if events[0].peer < 0:
            (event,) = events
            # Each rank has its own row counts, and counts the rows that leave it.
            numel = 0 if event.op == "all_to_all_rows" else event.numel
            return Call(communicator, collective=_Content(event.op, event.dtype, numel, event))
        messages = []
        for event in events:
            peer = communicator[0][event.peer]
            source, destination = (rank, peer) if event.op == "send" else (peer, rank)
            messages.append(MessageEnd(source, destination, _Content("", event.dtype, event.numel, event)))
        return Call(communicator, tuple(messages))

    def _conflict(self, conflict: Conflict) -> str:
        (rank, _), (other, _) = conflict.first, conflict.second
        assert isinstance(conflict.ours, _Content) and isinstance(conflict.theirs, _Content)
        ours, theirs = conflict.ours.event, conflict.theirs.event
        if ours.peer < 0:
            size = len(self.communicators[rank, ours.axis][0])
            return (
                f"rank {rank} calls {_words(ours)} where rank {other}, in the same group of {size}, calls {_words(theirs)}: a "
                "collective must be the same everywhere, in one order. The ranks would hang, or mix up two tensors. Make the calls "
                "of both ranks the same."
            )
        return (
            f"rank {rank} calls {_words(ours)}, and rank {other} at its other end {_words(theirs)}: the next message between them "
            "is not the same to both, and there are no tags. A stage would compute on other data, or hang. Post equal messages in "
            "one order on both ranks."
        )

    def _stuck(self, stuck: Stuck) -> str:
        lines = [
            f"rank {place[0]} waits for its {_words(self.events[place][0])}"
            for place in stuck.stopped
            if place in self.events
        ]
        for head in stuck.heads:
            rank, event = head.place[0], self.events[head.place][0]
            size = len(self.communicators[rank, event.axis][0])
            lines.append(
                f"rank {rank}: {_words(event)} in the group of {size} has no match and blocks "
                f"{counted(head.num_behind, 'later call')}"
            )
        shown = "\n  ".join(lines[:8])
        return (
            f"calls or waits that never end: {len(lines)}; every rank would hang until the timeout. Each call needs "
            f"its other ends, in one order on all ranks; the first that are stuck:\n  {shown}"
        )


def _words(event: Event) -> str:
    end = "" if event.peer < 0 else f" {'to' if event.op == 'send' else 'from'} member {event.peer}"
    name = event.op.replace("_", "-")
    return f"{name}{end} on {event.axis} ({event.purpose}, {event.numel:,} x {event.dtype})"
