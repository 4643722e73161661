"""What is derived from the actions: which transfers, in which order, how early. (That programs run: test_validate.)"""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Kind
from triaxis.engine.pipeline.lowering import Direction, Post, Program, Transfer, lower
from triaxis.engine.pipeline.text import from_text, program_to_text
from triaxis.engine.pipeline.validate import check

sizes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12))


def transfers_of(program: Program, rank: int) -> list[Transfer]:
    return [t for each in program.instructions[rank] if isinstance(each, Post) for t in each.transfers]


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_one_transfer_per_boundary_direction_and_microbatch(size: tuple[int, int, int]) -> None:
    """pp x vpp - 1 boundaries, none of them between ranks when there is one rank; each transfer at both its ends."""
    pp, vpp, num_microbatches = size
    program = lower(schedules.interleaved(*size))
    sent = [t for rank in range(pp) for t in transfers_of(program, rank) if t.source == rank]
    received = [t for rank in range(pp) for t in transfers_of(program, rank) if t.destination == rank]
    boundaries = pp * vpp - 1 if pp > 1 else 0
    expected = {
        Transfer(direction, source % pp, target % pp, target, microbatch)
        for stage in range(boundaries)
        for microbatch in range(num_microbatches)
        for direction, source, target in (("forward", stage, stage + 1), ("backward", stage + 1, stage))
    }
    assert set(sent) == set(received) == expected
    assert len(sent) == len(received) == len(expected)


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_both_ranks_of_a_pair_post_in_one_order(size: tuple[int, int, int]) -> None:
    """With pp 2 the transfers to the next and from the previous rank share a pair; the order still is one."""
    program = lower(schedules.interleaved(*size))
    orders: dict[tuple[Direction, frozenset[int]], dict[int, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    for rank in range(size[0]):
        for transfer in transfers_of(program, rank):
            orders[transfer.direction, frozenset((transfer.source, transfer.destination))][rank].append(transfer)
    assert bool(orders) == (size[0] > 1)
    for by_rank in orders.values():
        first, second = by_rank.values()
        assert first == second


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_the_actions_are_those_of_the_schedule(size: tuple[int, int, int]) -> None:
    schedule = schedules.interleaved(*size)
    rows = [tuple(each for each in row if isinstance(each, Action)) for row in lower(schedule).instructions]
    assert tuple(rows) == schedule.actions


def test_a_program_to_read() -> None:
    """Each receive stands before the action that precedes its consumer, each send right behind its producer."""
    assert program_to_text(lower(schedules.one_f_one_b(3, 3))).splitlines()[1:] == [
        "rank 0: 0F0 [>F0@1] 0F1 [>F1@1] [<B0@0] 0F2 [>F2@1] [<B1@0] 0B0 [<B2@0] 0B1 0B2",
        "rank 1: [<F0@1] [<F1@1] 0F0 [>F0@2] [<B0@1] 0F1 [<F2@1 >F1@2] 0B0 [>B0@0 <B1@1] 0F2 [>F2@2] 0B1 [>B1@0 <B2@1] 0B2 [>B2@0]",
        "rank 2: [<F0@2] 0F0 [<F1@2] 0B0 [>B0@1] 0F1 [<F2@2] 0B1 [>B1@1] 0F2 0B2 [>B2@1]",
    ]


def late_receives(program: Program, rank: int) -> list[tuple[Transfer, list[Transfer]]]:
    """Receives that stand behind the action that precedes their consumer.

    Returns:
        Each late receive, with what the rank posts on the same group behind that preceding action and before the receive.
    """
    placement = program.schedule.placement
    row = program.instructions[rank]
    late = []
    for position, each in enumerate(row):
        if not isinstance(each, Post):
            continue
        behind = [other for other in row[position + 1 :] if isinstance(other, Action)]
        for transfer in each.transfers:
            is_fed = [
                (placement.stage_of(rank, action.chunk), action.microbatch) == (transfer.stage, transfer.microbatch)
                and (action.kind is Kind.F) == (transfer.direction == "forward")
                for action in behind
            ]
            if transfer.destination != rank or is_fed.index(True) >= 1:
                continue
            start = max((i for i in range(position) if isinstance(row[i], Action)), default=-1)
            if start == -1:
                continue
            before = [
                t
                for other in row[start + 1 : position + 1]
                if isinstance(other, Post) and other.direction == transfer.direction
                for t in other.transfers
            ]
            late.append((transfer, before[: before.index(transfer)]))
    return late


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_a_receive_is_late_only_behind_a_send(size: tuple[int, int, int]) -> None:
    """Before the action that precedes its consumer, so that it overlaps; or behind what that action made, if it is sent first."""
    program = lower(schedules.interleaved(*size))
    for rank in range(size[0]):
        for transfer, before in late_receives(program, rank):
            assert any(other.source == rank for other in before), (rank, transfer)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_nearly_all_receives_are_early(pp: int) -> None:
    """In 1F1B all but the last few, whose data comes only after the rank has sent its own."""
    program = lower(schedules.one_f_one_b(pp, 16))
    num_late = sum(len(late_receives(program, rank)) for rank in range(pp))
    assert num_late <= (pp - 1) * (pp - 2)
    program = lower(schedules.interleaved(pp, 2, 16))
    num_receives = sum(t.destination == rank for rank in range(pp) for t in transfers_of(program, rank))
    assert sum(len(late_receives(program, rank)) for rank in range(pp)) < 0.15 * num_receives


def test_one_rank_needs_no_transfer() -> None:
    assert all(isinstance(each, Action) for each in lower(schedules.interleaved(1, 3, 4)).instructions[0])


def test_a_split_backward_sends_from_the_input_gradient() -> None:
    split = from_text(
        "schedule=split pp=2 vpp=1 microbatches=2 forward_only=no\n"
        "rank 0: 0F0 0F1 0I0 0I1 0W0 0W1\n"
        "rank 1: 0F0 0I0 0F1 0I1 0W0 0W1\n"
    )
    program = lower(split)
    assert check(program).peak_in_flight == (2, 1)
    row = program_to_text(program).splitlines()[2].split()
    assert row.index("[>B0@0]") == row.index("0I0") + 1
    assert row.index("[>B1@0]") == row.index("0I1") + 1


def test_a_schedule_without_an_order_is_refused() -> None:
    with pytest.raises(ScheduleError, match="wait for each other"):
        lower(from_text("schedule=x pp=2 vpp=1 microbatches=1 forward_only=no\nrank 0: 0B0 0F0\nrank 1: 0F0 0B0\n"))
