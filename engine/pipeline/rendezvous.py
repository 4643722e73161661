"""Executes many ranks' calls without devices, under rules stricter than NCCL's and gloo's.

A rank is a row of calls and steps. A step is a computation or a wait that needs some of its rank's earlier calls to be complete.
These rules always hold:

    channel        A rank runs its calls on a communicator in order. The first call that has not completed is the head.
    blocked head   A call whose peer does not come blocks all later calls in its channel.
    rendezvous     A send completes only together with its receive. Nothing is buffered.
    order          The k-th send from rank a to b meets the k-th receive at b from a. There are no tags.
    group call     The head's messages progress together, each with its peer's head. The call completes as a whole.
    collective     A collective completes when it is the head at every member.
    step           A step begins when the calls that it needs have completed. Posting never waits.

`Rules` adds what a GPU and NCCL may add in the worst case:

    first use      The first group call with a peer blocks the host until the peer's host is in the mirrored call. Both calls must
                   open the same connections (NVIDIA/nccl issue 783; pull request 2407).
    device         A step begins only when every earlier call on its rank has completed, as a cudaMalloc may require.
    one queue      Work after a call is launched only once the call is the head (CUDA_DEVICE_MAX_CONNECTIONS=1).

An event that can happen stays possible until it happens. So one execution gives the result for all speeds of ranks and links. A
program that ends under all rules together ends under each of them alone.
"""

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Place = tuple[int, int]
"""(rank, position in its row)."""

Connection = tuple[Hashable, int, int]
"""Communicator, source and destination for messages."""


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """One end of a send or receive.

    Attributes:
        source, destination: ranks; the rank that holds the message is one of them.
        content: key for the data that is sent; a send and receive with different keys are a `Conflict`.
    """

    source: int
    destination: int
    content: Hashable


@dataclass(frozen=True, slots=True)
class Call:
    """One call on a communicator: a group of messages, or a collective.

    Attributes:
        communicator: key for the group of ranks and its stream.
        messages: a group call's messages, in order; empty for a collective.
        collective: identity that must be equal at every member; None for a group call.
    """

    communicator: Hashable
    messages: tuple[MessageEnd, ...] = ()
    collective: Hashable = None


@dataclass(frozen=True, slots=True)
class Step:
    """A computation or a wait on one rank.

    Attributes:
        after: indices of calls in the rank's row (its calls and steps); these calls must complete before the step begins.
        needs: fact (such as a computed tensor) that another step must establish before this step begins; None: no fact.
        makes: fact that this step establishes for all ranks; None: no fact.
    """

    after: tuple[int, ...] = ()
    needs: Hashable = None
    makes: Hashable = None


Row = Sequence[Call | Step]


@dataclass(frozen=True, slots=True)
class Rules:
    """Worst-case limits of NCCL and the GPU, added to the rules that always hold.

    `execute` simulates all ranks' calls under them, to find deadlocks.

    Attributes:
        opened: connections that are open before the first call. The first use of any other blocks the host. None: all are open.
        steps_synchronize: whether a computation or wait (`Step`) waits for every earlier call on its rank.
        one_queue: whether a rank that posts a call waits until its earlier calls on the same communicator have completed.
    """

    opened: Collection[Connection] | None = None
    steps_synchronize: bool = False
    one_queue: bool = False


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two ranks' calls that should match but differ.

    Attributes:
        reason: `content` if the two are different messages or collectives; `connections` if both calls open connections between the
            two ranks, but not the same ones.
        first, second: (rank, index in its row of calls and steps) for each call.
        ours, theirs: the two contents, or each side's connections with the other rank that are not open yet.
    """

    reason: Literal["content", "connections"]
    first: Place
    second: Place
    ours: Hashable
    theirs: Hashable


@dataclass(frozen=True, slots=True)
class Head:
    """A call that never completes and blocks its rank's later calls on the communicator.

    Attributes:
        place: the rank, and the call's index in the rank's calls and steps.
        open: the call's sends and receives that no peer's call has matched.
        num_behind: number of later calls posted on the communicator.
    """

    place: Place
    open: tuple[MessageEnd, ...]
    num_behind: int


@dataclass(frozen=True, slots=True)
class Stuck:
    """Ranks and calls that wait for ever.

    Attributes:
        stopped: where each unfinished rank waits, as (rank, index in its calls and steps).
        heads: each rank's first call per communicator that has not completed.
    """

    stopped: tuple[Place, ...]
    heads: tuple[Head, ...]


@dataclass(slots=True)
class _Posted:
    """A call that its rank has posted and that has not completed.

    Attributes:
        open: the call's sends and receives that no peer's call has matched yet.
    """

    place: Place
    call: Call
    open: list[MessageEnd] = field(default_factory=list)

    def first_between(self, source: int, destination: int) -> MessageEnd | None:
        return next((each for each in self.open if (each.source, each.destination) == (source, destination)), None)


def execute(
    rows: Mapping[int, Row], members: Mapping[Any, Sequence[int]], rules: Rules | None = None
) -> Conflict | Stuck | None:
    """Execute all ranks' calls and steps, to find a conflict or a deadlock.

    Args:
        rows: each rank's calls and steps in order (its row), by rank.
        members: ranks that meet in a communicator's collectives, by communicator. A communicator without collectives needs no
            entry.
        rules: rules beyond those that always hold; None: no further rules.

    Returns:
        None if every row ended and every call completed. Otherwise the first two calls that should match but differ, or the ranks
        and calls that are stuck.
    """
    return _Execution(rows, members, rules or Rules()).run()


class _Execution:
    def __init__(self, rows: Mapping[int, Row], members: Mapping[Any, Sequence[int]], rules: Rules) -> None:
        self.rows = rows
        self.members = members
        self.rules = rules
        self.position = dict.fromkeys(rows, 0)
        self.channels: dict[tuple[Hashable, int], deque[_Posted]] = {}
        # By rank: the position of the last posted call, and the positions of calls that have not completed.
        self.last_posted = dict.fromkeys(rows, -1)
        self.outstanding: dict[int, set[int]] = {rank: set() for rank in rows}
        self.facts: set[Hashable] = set()
        self.waiting_for: dict[Hashable, list[int]] = {}
        self.opened = None if rules.opened is None else set(rules.opened)
        self.runnable: deque[int] = deque(rows)
        self.conflict: Conflict | None = None

    def run(self) -> Conflict | Stuck | None:
        while self.runnable and self.conflict is None:
            self._advance(self.runnable.popleft())
        if self.conflict is not None:
            return self.conflict
        stopped = tuple((rank, at) for rank, at in self.position.items() if at < len(self.rows[rank]))
        heads = tuple(
            Head(channel[0].place, tuple(channel[0].open), len(channel) - 1)
            for channel in self.channels.values()
            if channel
        )
        return Stuck(stopped, heads) if stopped or heads else None

    def _advance(self, rank: int) -> None:
        """Run a rank until it has to wait, its row ends, or two calls conflict."""
        row = self.rows[rank]
        while (at := self.position[rank]) < len(row) and self.conflict is None:
            item = row[at]
            if isinstance(item, Call):
                if not self._call(rank, at, item):
                    return
            elif not self._step(rank, item):
                return
            self.position[rank] = at + 1

    def _call(self, rank: int, at: int, call: Call) -> bool:
        """Post a call once its connections are open. Return whether the rank can go on."""
        channel = self.channels.setdefault((call.communicator, rank), deque())
        if self.last_posted[rank] < at:
            if self.opened is not None and not self._connect(rank, at, call):
                return False
            channel.append(_Posted((rank, at), call, list(call.messages)))
            self.last_posted[rank] = at
            self.outstanding[rank].add(at)
            if len(channel) == 1:
                self._progress(call.communicator, rank)
        return not self.rules.one_queue or at not in self.outstanding[rank] or channel[0].place == (rank, at)

    def _connect(self, rank: int, at: int, call: Call) -> bool:
        """Open a call's missing connections to peers that are now opening theirs to this rank.

        If the two ranks would open different connections with each other, record a conflict. Return whether all connections of the
        call are open.
        """
        assert self.opened is not None
        missing = self._missing(call)
        if not missing:
            return True
        for peer in {source + destination - rank for _, source, destination in missing}:
            there = self.position[peer]
            other = self.rows[peer][there] if there < len(self.rows[peer]) else None
            if not isinstance(other, Call) or other.communicator != call.communicator:
                continue
            ours = [each for each in missing if peer in each[1:]]
            theirs = [each for each in self._missing(other) if rank in each[1:]]
            if not theirs:
                continue
            if set(ours) != set(theirs):
                self.conflict = Conflict("connections", (rank, at), (peer, there), tuple(ours), tuple(theirs))
                return False
            self.opened.update(ours)
            self.runnable.append(peer)
        return not self._missing(call)

    def _missing(self, call: Call) -> list[Connection]:
        assert self.opened is not None
        used = [(call.communicator, message.source, message.destination) for message in call.messages]
        return [each for each in dict.fromkeys(used) if each not in self.opened]

    def _step(self, rank: int, step: Step) -> bool:
        """Run a step if it can begin; return whether it has run."""
        outstanding = self.outstanding[rank]
        if outstanding and (self.rules.steps_synchronize or any(at in outstanding for at in step.after)):
            return False
        if step.needs is not None and step.needs not in self.facts:
            self.waiting_for.setdefault(step.needs, []).append(rank)
            return False
        if step.makes is not None:
            self.facts.add(step.makes)
            self.runnable.extend(self.waiting_for.pop(step.makes, ()))
        return True

    def _progress(self, communicator: Hashable, rank: int) -> None:
        """Match a rank's first unfinished call with its peers' first unfinished calls.

        If calls complete, match the calls that follow them too.
        """
        agenda = [rank]
        while agenda and self.conflict is None:
            at = agenda.pop()
            channel = self.channels.get((communicator, at))
            if not channel:
                continue
            if channel[0].call.messages:
                agenda += self._meet_messages(communicator, at)
            else:
                agenda += self._meet_collective(communicator, at)

    def _meet_messages(self, communicator: Hashable, rank: int) -> list[int]:
        """Match the messages in a rank's first unfinished call with its peers' first unfinished calls.

        If a message differs, record a conflict. Return the ranks whose call completed.
        """
        head = self.channels[communicator, rank][0]
        completed = []
        for message in tuple(head.open):
            peer = message.source + message.destination - rank
            channel = self.channels.get((communicator, peer))
            if not channel or head.first_between(message.source, message.destination) is not message:
                continue
            other = channel[0].first_between(message.source, message.destination)
            if other is None:
                continue
            if other.content != message.content:
                self.conflict = Conflict("content", head.place, channel[0].place, message.content, other.content)
                return []
            head.open.remove(message)
            channel[0].open.remove(other)
            if not channel[0].open:
                self._complete(communicator, peer)
                completed.append(peer)
        if not head.open:
            self._complete(communicator, rank)
            completed.append(rank)
        return completed

    def _meet_collective(self, communicator: Hashable, rank: int) -> list[int]:
        """Complete a collective if it is the first unfinished call on every member.

        If a member is in another collective, record a conflict. Return the ranks whose call completed.
        """
        mine = self.channels[communicator, rank][0]
        members = self.members[communicator]
        is_whole = True
        for member in members:
            channel = self.channels.get((communicator, member))
            if not channel or channel[0].call.messages:
                is_whole = False
            elif channel[0].call.collective != mine.call.collective:
                theirs = channel[0]
                self.conflict = Conflict(
                    "content", mine.place, theirs.place, mine.call.collective, theirs.call.collective
                )
                return []
        if not is_whole:
            return []
        for member in members:
            self._complete(communicator, member)
        return list(members)

    def _complete(self, communicator: Hashable, rank: int) -> None:
        posted = self.channels[communicator, rank].popleft()
        self.outstanding[rank].discard(posted.place[1])
        self.runnable.append(rank)
