"""From compute actions to what a rank does: sends and receives are derived, in one function (no torch here).

    0F0 0F1 0B0 ...   ->   0F0 | send F0 to rank 1 | 0F1 | send F1, receive the gradient of 0 | 0B0 ...

**Channels.** Each pipeline axis has two process groups: activations go over `forward`, gradients over `backward`. A hand-over
between two stages of one rank is local and no transfer.

**The order.** NCCL matches the calls of a group by their order, and a call that waits for its peer holds up all behind it.
So all ranks post the transfers of a group in ONE order, the order of this key in the timeline of the schedule (F of cost 1,
B of cost 2, no latency):

    time(transfer) = max(end of the action that produces, end of the action two before the one that consumes)

The second term is the moment from which the receiver may post: before the action that precedes the consumer, so that the
transfer runs beside it, and no earlier, so that a rank holds at most one early receive buffer per direction (and chunk).

**Why no deadlock.** A rank reaches the post of a transfer by `time` at the latest, since all actions before it end by then;
all transfers before it in the order are done by `time`; and its consumer starts at `time` or later. So the timeline itself
is an execution of the program under NCCL's rules. (`engine.pipeline.validate` does not believe this: it runs the program.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.pipeline.actions import Action, Kind, Schedule
from engine.pipeline.simulate import Costs, Interval, simulate

Direction = Literal["forward", "backward"]
"""Names the process group: activations go forward, their gradients backward."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor that goes from one rank to another.

    Attributes:
        direction: the group it uses.
        source, destination: pp ranks, never the same.
        stage: the stage that receives.
        microbatch: of the tensor.
    """

    direction: Direction
    source: int
    destination: int
    stage: int
    microbatch: int

    def __str__(self) -> str:
        what = "activation" if self.direction == "forward" else "gradient"
        return (
            f"{what} of microbatch {self.microbatch} for stage {self.stage} (rank {self.source} to {self.destination})"
        )


@dataclass(frozen=True, slots=True)
class Post:
    """One asynchronous group call on one group: all transfers in it are posted together and progress together.

    The rank that holds the post is the source or the destination of each transfer.
    """

    direction: Direction
    transfers: tuple[Transfer, ...]


Instruction = Post | Action


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered schedule: per pp rank, posts and actions in order.

    An action first waits for the receive that feeds it. A send stands after the action that produced its data; nothing
    waits for sends.
    """

    schedule: Schedule
    instructions: tuple[tuple[Instruction, ...], ...]


@dataclass(frozen=True, slots=True)
class _Timed:
    """A transfer with its place in the common order, and where its two ends fit into their ranks' lists of actions.

    Attributes:
        time: see the module's docstring.
        after_producer: the number of actions of the source that must stand before the send.
        receive_from: the number of actions of the destination that stand before the earliest receive.
        consumer_start: when its data is needed.
    """

    transfer: Transfer
    time: float
    after_producer: int
    receive_from: int
    consumer_start: float

    @property
    def order(self) -> tuple[float, int, int]:
        """Between transfers of the same moment, the one nearer to the start of its pass goes first.

        A rank in its warm-up then receives the next microbatch while it computes, before it sends this one.
        """
        stage = self.transfer.stage
        return (self.time, stage if self.transfer.direction == "forward" else -stage, self.transfer.microbatch)


def feeding_transfer(schedule: Schedule, rank: int, action: Action) -> Transfer | None:
    """The transfer that an action of a rank waits for; None: it needs nothing, or what it needs is made on this rank."""
    placement = schedule.placement
    stage = placement.stage_of(rank, action.chunk)
    source = schedule.producer(stage, action)
    if source is None or placement.rank_of(source[0]) == rank:
        return None
    direction: Direction = "forward" if action.kind is Kind.F else "backward"
    return Transfer(direction, placement.rank_of(source[0]), rank, stage, action.microbatch)


def lower(schedule: Schedule) -> Program:
    """Derive sends and receives.

    Raises:
        ScheduleError: the actions wait for each other in a circle, or for actions that are not there.
    """
    timeline = simulate(schedule, Costs.uniform(schedule.placement.num_stages))
    mine: list[dict[Direction, list[_Timed]]] = [{"forward": [], "backward": []} for _ in schedule.actions]
    for timed in _timed_transfers(schedule, timeline.intervals):
        for rank in (timed.transfer.source, timed.transfer.destination):
            mine[rank][timed.transfer.direction].append(timed)
    rows = []
    for rank, actions in enumerate(schedule.actions):
        placed: dict[int, list[Post]] = {}
        for transfers in mine[rank].values():
            _place(rank, transfers, placed)
        row: list[Instruction] = []
        for position in range(len(actions) + 1):
            row += placed.get(position, [])
            row += actions[position : position + 1]
        rows.append(tuple(row))
    return Program(schedule, tuple(rows))


def _timed_transfers(schedule: Schedule, rows: Sequence[Sequence[Interval]]) -> list[_Timed]:
    """All transfers of a schedule in the common order."""
    place = {
        (
            schedule.placement.stage_of(rank, interval.action.chunk),
            _pass(interval.action),
            interval.action.microbatch,
        ): (rank, index)
        for rank, row in enumerate(rows)
        for index, interval in enumerate(row)
        if interval.action.kind is not Kind.W
    }
    timed = []
    for rank, row in enumerate(rows):
        for index, interval in enumerate(row):
            transfer = feeding_transfer(schedule, rank, interval.action)
            source = schedule.producer(schedule.placement.stage_of(rank, interval.action.chunk), interval.action)
            if transfer is None or source is None:
                continue
            source_rank, producer = place[(*source, transfer.microbatch)]
            receivable = row[index - 2].end if index >= 2 else 0
            timed.append(
                _Timed(
                    transfer,
                    time=max(rows[source_rank][producer].end, receivable),
                    after_producer=producer + 1,
                    receive_from=max(index - 1, 0),
                    consumer_start=interval.start,
                )
            )
    return sorted(timed, key=lambda t: t.order)


def _pass(action: Action) -> Kind:
    return Kind.F if action.kind is Kind.F else Kind.B


def _place(rank: int, timed: Sequence[_Timed], placed: dict[int, list[Post]]) -> None:
    """Add a rank's posts of one direction to `placed`, which holds the posts that stand before each of its actions."""
    position = 0
    group: list[_Timed] = []
    for t in timed:
        is_send = t.transfer.source == rank
        earliest = t.after_producer if is_send else t.receive_from
        # A group call ends as a whole, so nothing joins it that happens after the data of another member is needed.
        joins = earliest <= position and all(
            t.time <= other.consumer_start for other in group if other.transfer.destination == rank
        )
        if group and not joins:
            placed.setdefault(position, []).append(_post(group))
            group = []
        position = max(position, earliest)
        group.append(t)
    if group:
        placed.setdefault(position, []).append(_post(group))


def _post(group: list[_Timed]) -> Post:
    return Post(group[0].transfer.direction, tuple(t.transfer for t in group))
