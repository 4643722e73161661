"""The checker refuses what is wrong, with the right words and an arrow at the place.

Errors are planted in schedules and programs that are right; that all right ones pass is in test_schedules.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action
from triaxis.engine.pipeline.lowering import Instruction, Post, Program, Transfer, lower
from triaxis.engine.pipeline.text import from_text, program_to_text
from triaxis.engine.pipeline.validate import check

GOOD = schedules.one_f_one_b(2, 3)
SPLIT = """schedule=split pp=2 vpp=1 microbatches=2 forward_only=no
rank 0: 0F0 0F1 0I0 0W0 0I1 0W1
rank 1: 0F0 0I0 0F1 0I1 0W0 0W1
"""


def refused(subject: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(subject)  # type: ignore[arg-type]
    return str(caught.value)


def with_row(program: Program, rank: int, row: Sequence[Instruction]) -> Program:
    rows = list(program.instructions)
    rows[rank] = tuple(row)
    return replace(program, instructions=tuple(rows))


def without(program: Program, rank: int, transfer: Transfer) -> Program:
    row = [
        Post(each.direction, tuple(t for t in each.transfers if t != transfer)) if isinstance(each, Post) else each
        for each in program.instructions[rank]
    ]
    return with_row(program, rank, row)


def parse(text: str) -> Program:
    """The program whose text `program_to_text` would be; one direction's transfers are between neighbours of a loop."""
    header, *lines = text.strip().splitlines()
    rows: list[tuple[Instruction, ...]] = []
    pp = len(lines)
    for line in lines:
        row: list[Instruction] = []
        for part in line.split(": ")[1].replace("[", "|[").replace("]", "]|").split("|"):
            if not part.startswith("["):
                row += [Action.parse(token) for token in part.split()]
                continue
            transfers = []
            for token in part[1:-1].split():
                direction, stage, microbatch = token[1], int(token.split("@")[1]), int(token[2:].split("@")[0])
                source = (stage - 1) % pp if direction == "F" else (stage + 1) % pp
                name = "forward" if direction == "F" else "backward"
                transfers.append(Transfer(name, source, stage % pp, stage, microbatch))  # type: ignore[arg-type]
            row.append(Post(transfers[0].direction, tuple(transfers)))
        rows.append(tuple(row))
    compute = [" ".join(str(each) for each in row if isinstance(each, Action)) for row in rows]
    schedule = from_text("\n".join([header, *(f"rank {rank}: {row}" for rank, row in enumerate(compute))]))
    return Program(schedule, tuple(rows))


@pytest.mark.parametrize(
    ("row", "words", "arrow"),
    [
        ("0F0 0B0 0B1 0F1 0F2 0B2", "rank 1 runs 0B1 before 0F1", "^^^ here"),
        ("0F0 0B0 0F1 0B1 0F2", "rank 1 never runs 0B2", "^^^^^ missing"),
        ("0F0 0B0 0F1 0B1 0B2", "rank 1 runs 0B2 before 0F2", "^^^ here"),
        ("0F0 0B0 0F1 0F1 0B1 0F2 0B2", "rank 1 runs 0F1 after 0F1", "^^^ again"),
        ("0F0 0B0 0B0 0F1 0B1 0F2 0B2", "gradients would count twice", "^^^ first"),
        ("0F0 0B0 0I0 0F1 0B1 0F2 0B2", "rank 1 runs 0I0 after 0B0", "^^^ again"),
        ("0F0 0B0 0F1 0B1 0F2 0W2 0I2", "rank 1 runs 0W2 before 0I2", "^^^ here"),
        ("0F0 0B0 0F1 0B1 0F2 0I2", "rank 1 never runs 0W2", "^^^^^ missing"),
        ("0F0 0B0 0F1 0B1 0F2 0B2 0F3", "microbatches at 2", "^^^ here"),
        ("1F0 0F0 0B0 0F1 0B1 0F2 0B2", "chunks end at 0", "^^^ here"),
    ],
)
def test_a_wrong_row_is_shown(row: str, words: str, arrow: str) -> None:
    actions = tuple(Action.parse(token) for token in row.split())
    message = refused(replace(GOOD, actions=(GOOD.actions[0], actions)))
    assert words in message and arrow in message
    shown = message.splitlines()
    assert shown[1].startswith("  rank 0: 0F0 0F1 0B0") and shown[2].startswith("  rank 1: ")
    if "here" in arrow:
        place = shown[3].index("^")
        assert f"rank 1 {'has' if ' end at ' in message else 'runs'} {shown[2][place : place + 3]}" in message


def test_a_row_per_rank() -> None:
    assert "1 rows for pp 2" in refused(replace(GOOD, actions=GOOD.actions[:1]))


def test_no_backward_in_a_forward_only_schedule() -> None:
    assert "0B0 in a forward-only schedule" in refused(replace(GOOD, forward_only=True))


def test_a_long_row_is_cut_around_the_place() -> None:
    schedule = schedules.one_f_one_b(2, 64)
    row = list(schedule.actions[1])
    row[80], row[81] = row[81], row[80]
    message = refused(replace(schedule, actions=(schedule.actions[0], tuple(row))))
    assert "rank 1: ... 0F37 0B37 0F38 0B38 0F39 0B39 0B40 0F40" in message
    assert max(map(len, message.splitlines()[1:])) < 100


def test_actions_that_wait_in_a_circle() -> None:
    circle = "schedule=x pp=2 vpp=2 microbatches=1 forward_only=yes\nrank 0: 1F0 0F0\nrank 1: 0F0 1F0\n"
    message = refused(from_text(circle))
    assert "wait for each other in a circle" in message
    assert message.count("^^^ waits for ever") == 2


def test_a_split_backward_is_right() -> None:
    report = check(lower(from_text(SPLIT)))
    assert report.peak_in_flight == (2, 1) and report.num_transfers == (4, 4)


def test_a_report_counts() -> None:
    report = check(lower(schedules.interleaved(4, 2, 8)))
    assert report.peak_in_flight == (11, 9, 7, 5)
    assert report.peak_early_receives == (1, 1, 1, 1)
    assert report.num_transfers == (48, 64, 64, 48)
    assert check(schedules.interleaved(4, 2, 8)).num_transfers == (0, 0, 0, 0)


def test_early_receives_are_counted_per_direction_and_chunk() -> None:
    early = parse(
        """schedule=x pp=2 vpp=1 microbatches=3 forward_only=yes
rank 0: 0F0 [>F0@1] 0F1 [>F1@1] 0F2 [>F2@1]
rank 1: [<F0@1] [<F1@1] [<F2@1] 0F0 0F1 0F2"""
    )
    assert check(early).peak_early_receives == (0, 2)


PROGRAM = lower(schedules.one_f_one_b(2, 3))
F1 = Transfer("forward", 0, 1, 1, 1)
B1 = Transfer("backward", 1, 0, 0, 1)


@pytest.mark.parametrize(
    ("rank", "transfer", "words"),
    [
        (0, F1, "activation of microbatch 1 for stage 1 (rank 0 to 1) is never sent by rank 0"),
        (1, F1, "activation of microbatch 1 for stage 1 (rank 0 to 1) is never received by rank 1"),
        (1, B1, "gradient of microbatch 1 for stage 0 (rank 1 to 0) is never sent by rank 1"),
        (0, B1, "gradient of microbatch 1 for stage 0 (rank 1 to 0) is never received by rank 0"),
    ],
)
def test_a_dropped_transfer(rank: int, transfer: Transfer, words: str) -> None:
    message = refused(without(PROGRAM, rank, transfer))
    assert words in message and "its other end" in message and "makes it" in message and "needs it" in message


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_dropped_transfer_is_found(data: st.DataObject) -> None:
    program = lower(
        schedules.interleaved(data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6)))
    )
    rank = data.draw(st.integers(0, len(program.instructions) - 1))
    posted = [t for each in program.instructions[rank] if isinstance(each, Post) for t in each.transfers]
    transfer = data.draw(st.sampled_from(posted))
    assert f"the {transfer} is never" in refused(without(program, rank, transfer))


def test_a_transfer_posted_twice_or_without_need() -> None:
    row = PROGRAM.instructions[0]
    assert f"posts the {F1} twice" in refused(with_row(PROGRAM, 0, [*row, Post("forward", (F1,))]))
    nobody = F1._replace(microbatch=7)
    assert "has no place" in refused(with_row(PROGRAM, 0, [*row, Post("forward", (nobody,))]))
    assert "on the backward group" in refused(with_row(without(PROGRAM, 0, F1), 0, [*row, Post("backward", (F1,))]))


def test_a_send_before_its_data_and_a_receive_behind_its_use() -> None:
    early = with_row(PROGRAM, 0, [Post("forward", (F1,)), *without(PROGRAM, 0, F1).instructions[0]])
    assert f"sends the {F1} before it is made" in refused(early)
    late = with_row(PROGRAM, 1, [*without(PROGRAM, 1, F1).instructions[1], Post("forward", (F1,))])
    assert f"receives the {F1} after the action that needs it" in refused(late)


def test_actions_of_another_schedule() -> None:
    assert "not those of the schedule" in refused(replace(PROGRAM, schedule=schedules.gpipe(2, 3)))


def test_a_reversed_fifo_is_found() -> None:
    """There are no tags: stage 1 would compute microbatch 0 on the activations of microbatch 1."""
    message = refused(
        parse(
            """schedule=x pp=2 vpp=1 microbatches=2 forward_only=yes
rank 0: 0F0 [>F0@1] 0F1 [>F1@1]
rank 1: [<F1@1] [<F0@1] 0F0 0F1"""
        )
    )
    assert "post in different orders" in message
    assert "^^^^^^^ activation of microbatch 0 for stage 1" in message
    assert "^^^^^^^ activation of microbatch 1 for stage 1" in message


RECEIVE_THEN_SEND = """schedule=x pp=2 vpp=2 microbatches=2 forward_only=yes
rank 0: 0F0 [>F0@1] 0F1 {zero} 1F0 [<F1@2] [>F0@3] 1F1 [>F1@3]
rank 1: [<F0@1] 0F0 {one} 0F1 [>F1@2] [<F0@3] 1F0 [<F1@3] 1F1
"""


@pytest.mark.parametrize(
    ("zero", "one", "runs"),
    [
        ("[<F0@2] [>F1@1]", "[<F1@1] [>F0@2]", False),
        ("[>F1@1] [<F0@2]", "[>F0@2] [<F1@1]", False),
        ("[>F1@1] [<F0@2]", "[<F1@1] [>F0@2]", True),
        ("[<F0@2] [>F1@1]", "[>F0@2] [<F1@1]", True),
        ("[>F1@1 <F0@2]", "[<F1@1 >F0@2]", True),
    ],
)
def test_receive_receive_send_send_is_rejected(zero: str, one: str, runs: bool) -> None:
    """Both ranks have a message for the other. Alone, a receive on both sides (or a send) waits for ever; gloo runs it.

    One order on both ranks runs, and so does a group call.
    """
    program = parse(RECEIVE_THEN_SEND.format(zero=zero, one=one))
    if runs:
        check(program)
        return
    message = refused(program)
    assert "deadlock: posts that no peer meets" in message
    assert message.count("is not met, and holds up all posts behind it") == 2


def test_transfers_grouped_at_one_end_alone_are_rejected() -> None:
    """They would run here, but NCCL does not define it."""
    message = refused(parse(RECEIVE_THEN_SEND.format(zero="[<F0@2 >F1@1]", one="[<F1@1] [>F0@2]")))
    assert "rank 0 groups 2 transfers with rank 1 in one call on the forward group, and rank 1 does not" in message
    assert "^^^^^^^^^^^^^ here" in message


def test_a_blocked_head_blocks_other_peers_too() -> None:
    """Rank 1 posts the receive of microbatch 1 before it sends microbatch 0 on; rank 0 makes 1 only after rank 2 was heard."""
    message = refused(
        parse(
            """schedule=x pp=3 vpp=1 microbatches=2 forward_only=no
rank 0: 0F0 [>F0@1] [<B0@0] 0B0 0F1 [>F1@1] [<B1@0] 0B1
rank 1: [<F0@1] 0F0 [<F1@1] [>F0@2] [<B0@1] 0B0 [>B0@0] 0F1 [>F1@2] [<B1@1] 0B1 [>B1@0]
rank 2: [<F0@2] 0F0 0B0 [>B0@1] [<F1@2] 0F1 0B1 [>B1@1]"""
        )
    )
    assert "holds up all posts behind it: activation of microbatch 1 for stage 1 (rank 0 to 1)" in message


def test_a_group_call_ends_as_a_whole() -> None:
    """Rank 1 cannot use microbatch 0 before microbatch 1 is there as well, which rank 0 makes after 0 came back."""
    text = """schedule=x pp=2 vpp=1 microbatches=2 forward_only=no
rank 0: 0F0 [>F0@1] [<B0@0] 0B0 0F1 [>F1@1] [<B1@0] 0B1
rank 1: {receives} 0F0 0B0 [>B0@0] 0F1 0B1 [>B1@0]
"""
    assert "deadlock" in refused(parse(text.format(receives="[<F0@1 <F1@1]")))
    check(parse(text.format(receives="[<F0@1] [<F1@1]")))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_programs_run_under_the_weaker_rule_of_one_fifo_per_pair(data: st.DataObject) -> None:
    """NCCL's own rule, executed here by other code, in an order of ranks that is drawn: what `check` accepts, runs."""
    size = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 8)))
    program = lower(schedules.interleaved(*size))
    check(program)
    order = data.draw(st.permutations(range(size[0])))
    assert runs_per_pair(program, order)


def runs_per_pair(program: Program, order: Sequence[int]) -> bool:
    placement = program.schedule.placement
    position = dict.fromkeys(order, 0)
    queues: dict[tuple[str, int, int], list[list[Transfer]]] = {}
    met: set[Transfer] = set()
    done: set[tuple[int, str, int]] = set()
    moved = True
    while moved:
        moved = False
        for rank in order:
            row = program.instructions[rank]
            while position[rank] < len(row):
                each = row[position[rank]]
                if isinstance(each, Post):
                    peers = sorted({t.source + t.destination - rank for t in each.transfers})
                    for peer in peers:
                        part = [t for t in each.transfers if peer in (t.source, t.destination)]
                        queues.setdefault((each.direction, rank, peer), []).append(part)
                else:
                    stage = placement.stage_of(rank, each.chunk)
                    way = "forward" if each.kind.value == "F" else "backward"
                    before = stage - 1 if way == "forward" else stage + 1
                    if 0 <= before < placement.num_stages:
                        source = placement.rank_of(before)
                        needed = Transfer(way, source, rank, stage, each.microbatch)  # type: ignore[arg-type]
                        ready = (before, way, each.microbatch) in done if source == rank else needed in met
                        if not ready:
                            break
                    done.add((stage, way, each.microbatch))
                position[rank] += 1
                moved = True
        for (direction, rank, peer), queue in queues.items():
            other = queues.get((direction, peer, rank), [])
            common = [t for t in queue[0] if t in other[0]] if queue and other else []
            for transfer in common:
                queue[0].remove(transfer)
                other[0].remove(transfer)
                met.add(transfer)
                moved = True
            for one in (queue, other):
                while one and not one[0]:
                    one.pop(0)
    return all(position[rank] == len(program.instructions[rank]) for rank in order) and not any(queues.values())


def test_the_parser_of_this_file_reads_what_is_written() -> None:
    program = lower(schedules.interleaved(3, 2, 3))
    assert parse(program_to_text(program)) == program
