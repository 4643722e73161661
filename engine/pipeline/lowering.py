"""Derives each rank's sends and receives from a schedule's compute actions.

    0F0 0F1 0B0 ...   ->   0F0 | send F0 to rank 1 | 0F1 | send F1, receive the gradient of 0 | 0B0 ...

Activations go over the process group `forward`, gradients over `backward`. A hand-over between two stages on one rank is no
transfer.

**Early receives.** In a program's early form, each receive is posted before the action that precedes its consumer (the action
that reads the tensor). The receive overlaps the preceding action. A rank holds at most one early receive buffer per direction
and chunk.

**Late receives.** In the late form, each receive is posted right before its consumer, or before the weight-gradient actions that
precede the consumer. Every transfer is exposed, but no receive waits on the device during another action.

**The order.** NCCL matches a process group's calls by their order. So all ranks sort the group's transfers by the same key, a time
in the schedule's timeline (F costs 1, B costs 2, no latency). With early receives:

    time(transfer) = max(end of the producing action, end of the action two places before the consumer on its rank)

**Grouping.** One call can hold several transfers. NCCL does not define what happens if two ranks group their common transfers
differently. So calls are split until both ranks group them alike.

**Why no deadlock.** A rank posts a transfer by `time` at the latest. All transfers earlier in the order are done by `time`, and the
transfer's consumer starts at `time` or later. So the timeline itself is an execution of the program under NCCL's rules.
`triaxis.engine.pipeline.validate` does not rely on this proof.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from triaxis.engine.pipeline.actions import Action, Kind, Schedule
from triaxis.engine.pipeline.simulate import Costs, Interval, simulate

Direction = Literal["forward", "backward"]
"""Process group of a transfer: activations go forward, their gradients backward."""

Receives = Literal["early", "late"]
"""When a receive is posted: before the action that precedes its consumer, or right before its consumer."""


class Transfer(NamedTuple):
    """One tensor that goes from one rank to another.

    Attributes:
        direction: group that carries the tensor, `forward` or `backward`.
        source, destination: the sending and the receiving pp rank, which differ.
        stage: the stage that receives.
        microbatch: the tensor's microbatch.
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
    """One asynchronous call on one group, whose transfers progress together.

    The rank that runs the post is the source or the destination of each transfer.
    """

    direction: Direction
    transfers: tuple[Transfer, ...]


Instruction = Post | Action


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered schedule, with each pp rank's posts and actions in order.

    An action first waits for the receive that brings its input. Nothing waits for sends.

    Attributes:
        receives: `early` if receives are posted one action ahead; `late` if they are posted right before their consumer.
    """

    schedule: Schedule
    instructions: tuple[tuple[Instruction, ...], ...]
    receives: Receives = "early"


@dataclass(frozen=True, slots=True)
class _Timed:
    """A transfer, with its sorting key and the earliest positions for its send and receive.

    Attributes:
        time: sorting key: earliest time at which both ends can have posted the transfer, in the schedule's simulated timeline.
        after_producer: number of the source's actions that must come before the send.
        receive_from: number of the destination's actions that must come before the receive.
        consumer_start: time at which the action that reads the tensor starts.
    """

    transfer: Transfer
    time: float
    after_producer: int
    receive_from: int
    consumer_start: float

    @property
    def order(self) -> tuple[float, int, int]:
        """The key by which all ranks sort transfers: (`time`, stage, microbatch).

        The stage is the receiver's, negative in the backward. So at equal times, a rank posts its receive before its send to the
        next stage.
        """
        stage = self.transfer.stage
        return (self.time, stage if self.transfer.direction == "forward" else -stage, self.transfer.microbatch)


def feeding_transfer(schedule: Schedule, rank: int, action: Action) -> Transfer | None:
    """Find the transfer that a rank's action waits for.

    Return None if this rank computes the action's input, or if the action has no input.
    """
    placement = schedule.placement
    stage = placement.stage_of(rank, action.chunk)
    source = schedule.input_of(stage, action)
    if source is None or placement.rank_of(source.stage) == rank:
        return None
    direction: Direction = "forward" if action.kind is Kind.F else "backward"
    return Transfer(direction, placement.rank_of(source.stage), rank, stage, action.microbatch)


def lower(schedule: Schedule, receives: Receives = "early") -> Program:
    """Derive every rank's sends and receives from a schedule.

    Args:
        schedule: every rank's complete compute actions.
        receives: when to post a receive: `late` right before the action that reads the tensor, `early` one action sooner.
            `programs.py` chooses between the two programs.

    Raises:
        ScheduleError: the actions wait for each other in a circle, or for actions that are missing.
    """
    # Uniform costs, not measured ones: each rank lowers the schedule by itself, and all must arrive at one order.
    timeline = simulate(schedule, Costs.uniform(schedule.placement.num_stages))
    mine: list[dict[Direction, list[_Timed]]] = [{"forward": [], "backward": []} for _ in schedule.actions]
    for timed in _timed_transfers(schedule, timeline.intervals, lead=1 if receives == "early" else 0):
        # Both ends get the sorted list, so a pair's two ranks have their common transfers in one order.
        for rank in (timed.transfer.source, timed.transfer.destination):
            mine[rank][timed.transfer.direction].append(timed)
    placed: list[list[_Placed]] = [[] for _ in schedule.actions]
    for rank, by_direction in enumerate(mine):
        # Separate by direction: these are two communicators, and a group call belongs to one.
        for transfers in by_direction.values():
            placed[rank] += _place(rank, transfers)
    _group_alike(placed)
    rows = []
    for actions, posts in zip(schedule.actions, placed, strict=True):
        before: dict[int, list[Post]] = {}
        for each in posts:
            before.setdefault(each.position, []).append(Post(each.transfers[0].direction, tuple(each.transfers)))
        row: list[Instruction] = []
        for position in range(len(actions) + 1):
            row += before.get(position, [])
            row += actions[position : position + 1]
        rows.append(tuple(row))
    return Program(schedule, tuple(rows), receives)


def _timed_transfers(schedule: Schedule, rows: Sequence[Sequence[Interval]], lead: int) -> list[_Timed]:
    """List a schedule's transfers, sorted by `_Timed.order`. Receives come `lead` actions before their consumer.

    With `lead` 0, receives also come before W actions that directly precede the consumer.
    """
    stage_of = schedule.placement.stage_of
    place = {
        output: (rank, index)
        for rank, row in enumerate(rows)
        for index, interval in enumerate(row)
        if (output := schedule.output_of(stage_of(rank, interval.action.chunk), interval.action)) is not None
    }
    timed = []
    for rank, row in enumerate(rows):
        for index, interval in enumerate(row):
            transfer = feeding_transfer(schedule, rank, interval.action)
            source = schedule.input_of(stage_of(rank, interval.action.chunk), interval.action)
            if transfer is None or source is None:
                continue
            source_rank, producer = place[source]
            receive_from = max(index - lead, 0)
            # A W hands nothing over, and its rank's last send may be met only after this receive.
            while lead == 0 and receive_from > 0 and row[receive_from - 1].action.kind is Kind.W:
                receive_from -= 1
            receivable = row[receive_from - 1].end if receive_from > 0 else 0
            timed.append(
                _Timed(
                    transfer,
                    time=max(rows[source_rank][producer].end, receivable),
                    after_producer=producer + 1,
                    receive_from=receive_from,
                    consumer_start=interval.start,
                )
            )
    return sorted(timed, key=lambda t: t.order)


@dataclass(slots=True)
class _Placed:
    """One group call of a rank, placed before the rank's action with index `position`."""

    position: int
    transfers: list[Transfer]


def _place(rank: int, timed: Sequence[_Timed]) -> list[_Placed]:
    """Group a rank's transfers in one direction, and place the groups between its actions."""
    placed: list[_Placed] = []
    position = 0
    group: list[_Timed] = []
    for t in timed:
        is_send = t.transfer.source == rank
        earliest = t.after_producer if is_send else t.receive_from
        # A group call ends as a whole, so a transfer that comes after another member's data is needed does not join it.
        # Nor does one that is possible only after further actions (`earliest`): the whole group would move and be delayed.
        joins = earliest <= position and all(
            t.time <= other.consumer_start for other in group if other.transfer.destination == rank
        )
        if group and not joins:
            placed.append(_Placed(position, [other.transfer for other in group]))
            group = []
        # Never back: a transfer that could be posted early still follows all earlier ones in the common order.
        position = max(position, earliest)
        group.append(t)
    if group:
        placed.append(_Placed(position, [other.transfer for other in group]))
    return placed


def _group_alike(placed: list[list[_Placed]]) -> None:
    """Split group calls, in place, until any two ranks group their common transfers alike.

    Two common transfers then share a call on both ranks or on neither. Transfers keep their order.
    """
    # A cut may leave a peer's group unlike this one, so the loop repeats until none is cut. Groups only shrink, so it ends.
    changed = True
    while changed:
        changed = False
        # Only a group with several transfers can differ from its peers' groups; all others have no entry.
        group_of = {
            (rank, transfer): id(group)
            for rank, groups in enumerate(placed)
            for group in groups
            if len(group.transfers) > 1
            for transfer in group.transfers
        }
        for rank, groups in enumerate(placed):
            split: list[_Placed] = []
            for group in groups:
                cut = _first_grouped_otherwise(rank, group.transfers, group_of)
                if cut is not None:
                    split.append(_Placed(group.position, group.transfers[:cut]))
                    group = _Placed(group.position, group.transfers[cut:])
                    changed = True
                split.append(group)
            placed[rank] = split


def _first_grouped_otherwise(
    rank: int, transfers: Sequence[Transfer], group_of: Mapping[tuple[int, Transfer], int]
) -> int | None:
    """Find the index before which a rank's group call must be split; None if nowhere.

    The peer posts the transfer at this index in another call than the previous transfer between the same two ranks.
    """
    last_of: dict[int, Transfer] = {}
    for place, transfer in enumerate(transfers):
        peer = transfer.source + transfer.destination - rank
        if (before := last_of.get(peer)) is not None:
            group = group_of.get((peer, before))
            # None: the peer posts the previous one by itself.
            if group is None or group != group_of.get((peer, transfer)):
                return place
        last_of[peer] = transfer
    return None
