"""The ledgers of many ranks, executed together under NCCL's rules: would these ranks have met?

The rules are those of `engine.pipeline.rendezvous`, for every call and not only for the pipeline's:

    communicator   one per group of ranks (two for a pipeline, one per direction); axes with the same ranks share it
    call           a collective, or the sends and receives that were posted together; equal at all its ends: operation, dtype, numel
    wait           a step that needs one call
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from engine.comm.collectives import Event
from engine.errors import ScheduleError
from engine.layout.axis_groups import axis_groups
from engine.layout.rank_grid import RankGrid
from engine.pipeline.rendezvous import Call, Conflict, Message, Place, Row, Step, Stuck, execute

Communicator = tuple[tuple[int, ...], str]
"""Ranks, and the channel that parts the two directions of a pipeline."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Calls that met, by axis: collectives (each once, however many members) and messages."""

    num_ranks: int
    collectives: dict[str, int]
    messages: dict[str, int]


def replay(logs: Mapping[int, Sequence[Event]], grid: RankGrid, kv_heads: int | None) -> Replayed:
    """Run the ledgers of some ranks to their end.

    Args:
        logs: posts and waits of each rank, in order; marks are passed over. Members of a communicator that have no log are
            taken for copies of those that have: they come to each call when these do. A pipeline must be whole.
        grid: of all ranks.
        kv_heads: of the model, as for `Topology`.

    Raises:
        ScheduleError: two ends of a call differ, or ranks wait for each other for ever; the message names ranks and calls.
    """
    return _Replay(logs, grid, kv_heads).run()


class _Replay:
    def __init__(self, logs: Mapping[int, Sequence[Event]], grid: RankGrid, kv_heads: int | None) -> None:
        self.communicators: dict[tuple[int, str], Communicator] = {}
        for axis, groups, channel in axis_groups(grid, kv_heads):
            for ranks in groups:
                for rank in ranks:
                    if rank in logs:
                        self.communicators[rank, axis] = (ranks, channel)
        self.members = {
            communicator: [rank for rank in communicator[0] if rank in logs]
            for communicator in self.communicators.values()
        }
        # Of each item of a row, the events that it stands for.
        self.events: dict[Place, list[Event]] = {}
        self.rows = {rank: self._row(rank, log) for rank, log in logs.items()}

    def run(self) -> Replayed:
        failure = execute(self.rows, self.members)
        if isinstance(failure, Conflict):
            self._fail_conflict(failure)
        if failure is not None:
            raise ScheduleError(self._stuck(failure))
        # Everything has met, so each end is counted, and a call once by the first member that has a log.
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
        """Translate a rank's ledger: posts of one group call into a call, a wait into a step."""
        row: list[Call | Step] = []
        position_of: dict[int, int] = {}
        for event in log:
            here = (rank, len(row))
            if event.phase == "wait":
                self.events[here] = [event]
                row.append(Step((position_of[event.call],)))
            elif event.phase == "post":
                before = (rank, len(row) - 1)
                joins = before in self.events and event.group_call == self.events[before][0].call
                if joins and self.events[before][0].phase == "post":
                    self.events[before].append(event)
                    row[-1] = self._call(rank, self.events[before])
                else:
                    self.events[here] = [event]
                    row.append(self._call(rank, [event]))
                position_of[event.call] = len(row) - 1
        return row

    def _call(self, rank: int, events: Sequence[Event]) -> Call:
        communicator = self.communicators.get((rank, events[0].axis))
        if communicator is None:
            raise ScheduleError(
                f"rank {rank} called {_words(events[0])} on an axis that it has no group of. Nobody would meet it; the ledger is "
                "of another layout, or the call is wrong."
            )
        if events[0].peer < 0:
            (event,) = events
            return Call(communicator, collective=(event.op, event.dtype, event.numel))
        messages = []
        for event in events:
            peer = communicator[0][event.peer]
            source, destination = (rank, peer) if event.op == "send" else (peer, rank)
            messages.append(Message(source, destination, _content(event)))
        return Call(communicator, tuple(messages))

    def _fail_conflict(self, conflict: Conflict) -> NoReturn:
        (rank, _), (other, _) = conflict.first, conflict.second
        events, others = self.events[conflict.first], self.events[conflict.second]
        ours, theirs = events[0], others[0]
        if ours.peer < 0:
            size = len(self.communicators[rank, ours.axis][0])
            raise ScheduleError(
                f"rank {rank} calls {_words(ours)} where rank {other}, in the same group of {size}, calls {_words(theirs)}: a "
                "collective must be the same everywhere, in one order. The ranks would hang, or mix up two tensors. Make the calls "
                "of both ranks the same."
            )
        ranks = self.communicators[rank, ours.axis][0]
        ours = next(each for each in events if (each.peer, _content(each)) == (ranks.index(other), conflict.ours))
        theirs = next(each for each in others if (each.peer, _content(each)) == (ranks.index(rank), conflict.theirs))
        raise ScheduleError(
            f"rank {rank} calls {_words(ours)}, and rank {other} at its other end {_words(theirs)}: the next message between them "
            "is not the same to both, and there are no tags. A stage would compute on other data, or hang. Post equal messages in "
            "one order on both ranks."
        )

    def _stuck(self, stuck: Stuck) -> str:
        lines = []
        for place in stuck.stopped:
            if place in self.events:
                lines.append(f"rank {place[0]} waits for its {_words(self.events[place][0])}")
        for head in stuck.heads:
            rank = head.place[0]
            event = self.events[head.place][0]
            size = len(self.communicators[rank, event.axis][0])
            lines.append(
                f"rank {rank}: {_words(event)} in the group of {size} is not met, and holds up {head.num_behind} calls"
            )
        shown = "\n  ".join(lines[:8])
        return (
            f"{len(lines)} calls or waits have no end: every rank would hang until the timeout. Each call needs its other ends, in "
            f"one order on all ranks; the first that are stuck:\n  {shown}"
        )


def _content(event: Event) -> tuple[object, int]:
    """Return what both ends of a message must agree on."""
    return (event.dtype, event.numel)


def _words(event: Event) -> str:
    end = "" if event.peer < 0 else f" {'to' if event.op == 'send' else 'from'} member {event.peer}"
    name = event.op.replace("_", "-")
    return f"{name}{end} on {event.axis} ({event.purpose}, {event.numel:,} x {event.dtype})"
