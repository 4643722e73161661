"""The ledgers of many ranks, replayed together under NCCL's rules: would these ranks have met?

The rules are those of `engine.pipeline.rendezvous`, for every call and not only for the pipeline's:

    communicator   one per group of ranks (two for a pipeline, one per direction); axes with the same ranks share it
    FIFO           a rank's calls on a communicator go one after the other; a head that is not met holds up all behind it
    collective     completes when it is the head at every member, and is the same there: operation, dtype, numel
    send, receive  the k-th from a to b meets the k-th at b from a; dtype and numel must agree. No tags, no buffering.
    group call     sends and receives that were posted together progress together and complete as a whole
    wait           a rank goes on when the group call has completed; posting never waits

What can happen stays possible until it happens, so one execution decides for all speeds of ranks and links.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.collectives import Event
from engine.errors import ScheduleError
from engine.rank_grid import RankGrid
from engine.topology import axis_groups

Communicator = tuple[tuple[int, ...], str]
"""Ranks, and the channel that parts the two directions of a pipeline."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What met: collectives (each once, however many members) and messages, by axis."""

    num_ranks: int
    collectives: dict[str, int]
    messages: dict[str, int]


@dataclass(slots=True)
class _Call:
    """A group call of one rank; `open` are its messages that have not met their other end."""

    events: list[Event]
    open: list[Event] = field(default_factory=list)
    done: bool = False

    @property
    def is_collective(self) -> bool:
        return self.events[0].peer < 0


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
        self.logs = logs
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
        self.position = dict.fromkeys(logs, 0)
        self.posted: dict[int, dict[int, _Call]] = {rank: {} for rank in logs}
        self.queues: dict[tuple[Communicator, int], deque[_Call]] = {}
        self.runnable = deque(logs)
        self.collectives: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def run(self) -> Replayed:
        while self.runnable:
            self._advance(self.runnable.popleft())
        if any(self.position[rank] < len(log) for rank, log in self.logs.items()) or any(self.queues.values()):
            raise ScheduleError(self._stuck())
        return Replayed(len(self.logs), dict(self.collectives), dict(self.messages))

    def _advance(self, rank: int) -> None:
        """Run a rank until it has to wait."""
        log, posted = self.logs[rank], self.posted[rank]
        while (at := self.position[rank]) < len(log):
            event = log[at]
            if event.phase == "post":
                at = self._post(rank, at)
            elif event.phase == "wait":
                if not posted[event.call].done:
                    return
                at += 1
            else:
                at += 1
            self.position[rank] = at

    def _post(self, rank: int, at: int) -> int:
        """Post the group call that begins at a place of the rank's log; returns the place behind it."""
        log = self.logs[rank]
        events = [log[at]]
        while at + len(events) < len(log):
            following = log[at + len(events)]
            if following.phase != "post" or following.group_call != events[0].call:
                break
            events.append(following)
        call = _Call(events)
        if not call.is_collective:
            call.open = list(events)
        for event in events:
            self.posted[rank][event.call] = call
        communicator = self.communicators.get((rank, events[0].axis))
        if communicator is None:
            raise ScheduleError(
                f"rank {rank} called {_words(events[0])} on an axis that it has no group of. Nobody would meet it; the ledger is "
                "of another layout, or the call is wrong."
            )
        queue = self.queues.setdefault((communicator, rank), deque())
        queue.append(call)
        if len(queue) == 1:
            self._progress(communicator, rank)
        return at + len(events)

    def _progress(self, communicator: Communicator, rank: int) -> None:
        """Let a new head meet the heads of its peers, and what follows them, as far as it goes."""
        agenda = [rank]
        while agenda:
            at = agenda.pop()
            queue = self.queues[communicator, at]
            if queue and queue[0].is_collective:
                agenda += self._meet_collective(communicator, at)
            elif queue:
                agenda += self._meet_messages(communicator, at)

    def _meet_collective(self, communicator: Communicator, rank: int) -> list[int]:
        """The ranks whose head has completed."""
        mine = self.queues[communicator, rank][0]
        members = self.members[communicator]
        waiting = False
        for other in members:
            queue = self.queues.get((communicator, other))
            if not queue or not queue[0].is_collective:
                waiting = True
                continue
            ours, theirs = mine.events[0], queue[0].events[0]
            if (ours.op, ours.dtype, ours.numel) != (theirs.op, theirs.dtype, theirs.numel):
                raise ScheduleError(
                    f"rank {rank} calls {_words(ours)} where rank {other}, in the same group of {len(communicator[0])}, calls "
                    f"{_words(theirs)}: a collective must be the same everywhere, in one order. The ranks would hang, or mix up "
                    "two tensors. Make the calls of both ranks the same."
                )
        if waiting:
            return []
        self.collectives[mine.events[0].axis] += 1
        for other in members:
            self._complete(communicator, other)
        return list(members)

    def _meet_messages(self, communicator: Communicator, rank: int) -> list[int]:
        """The ranks whose head has completed."""
        ranks = communicator[0]
        head = self.queues[communicator, rank][0]
        completed = []
        for event in tuple(head.open):
            peer = ranks[event.peer]
            queue = self.queues.get((communicator, peer))
            if not queue or queue[0].is_collective:
                continue
            wanted = "recv" if event.op == "send" else "send"
            if _first(head.open, event.op, event.peer) is not event:
                continue
            other = _first(queue[0].open, wanted, ranks.index(rank))
            if other is None:
                continue
            if (event.dtype, event.numel) != (other.dtype, other.numel):
                raise ScheduleError(
                    f"rank {rank} calls {_words(event)}, and rank {peer} at its other end {_words(other)}: the next message "
                    "between them is not the same to both, and there are no tags. A stage would compute on other data, or hang. "
                    "Post equal messages in one order on both ranks."
                )
            head.open.remove(event)
            queue[0].open.remove(other)
            self.messages[event.axis] += 1
            if not queue[0].open:
                self._complete(communicator, peer)
                completed.append(peer)
        if not head.open:
            self._complete(communicator, rank)
            completed.append(rank)
        return completed

    def _complete(self, communicator: Communicator, rank: int) -> None:
        self.queues[communicator, rank].popleft().done = True
        self.runnable.append(rank)

    def _stuck(self) -> str:
        lines = []
        for rank, log in self.logs.items():
            at = self.position[rank]
            if at < len(log):
                lines.append(f"rank {rank} waits for its {_words(log[at])}")
        for ((ranks, _), rank), queue in self.queues.items():
            if queue:
                head = queue[0]
                events = head.open or head.events
                lines.append(
                    f"rank {rank}: {_words(events[0])} in the group of {len(ranks)} is not met, and holds up {len(queue) - 1} calls"
                )
        shown = "\n  ".join(lines[:8])
        return (
            f"{len(lines)} calls or waits have no end: every rank would hang until the timeout. Each call needs its other ends, in "
            f"one order on all ranks; the first that are stuck:\n  {shown}"
        )


def _first(messages: Sequence[Event], op: str, peer: int) -> Event | None:
    """The first of some messages with this operation and peer."""
    for message in messages:
        if message.op == op and message.peer == peer:
            return message
    return None


def _words(event: Event) -> str:
    end = "" if event.peer < 0 else f" {'to' if event.op == 'send' else 'from'} member {event.peer}"
    name = event.op.replace("_", "-")
    return f"{name}{end} on {event.axis} ({event.purpose}, {event.numel:,} x {event.dtype})"
