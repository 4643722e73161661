"""Who waits for whom, told from what ranks were doing: crafted scenes, of which a person can read the report."""

from collections.abc import Sequence

import pytest

from triaxis.engine.comm.ledger import NO_PEER
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action, Schedule
from triaxis.engine.resilience.hang.heartbeat import Beat
from triaxis.engine.resilience.hang.report import HangReport, RankStatus, RunLayout

NUM_MICROBATCHES = 8


def scene(tp: int, pp: int, dp: int, ranks_per_node: int | None = None) -> RunLayout:
    grid = RankGrid(ParallelSizes(tp=tp, pp=pp, dp=dp), ranks_per_node)
    pipelines = grid.groups("pp")
    groups = {"world": [tuple(range(grid.world_size))], "tp": grid.groups("tp"), "dp": grid.groups("dp", "cp")}
    by_name = [schedules.build(name, pp, 1, NUM_MICROBATCHES) for name in ("1f1b", "forward_only")]
    return RunLayout(grid, groups | dict.fromkeys(("pp", "pp_forward", "pp_backward"), pipelines), *by_name)


def position(schedule: Schedule, pp: int, action: str) -> int:
    """Find the place of an action in the row of a pp rank, from 1."""
    return schedule.actions[pp].index(Action.parse(action)) + 1


def beat(rank: int, part: str, call: tuple[str, str, str] = ("", "", ""), peer: int = NO_PEER, at: int = 0) -> Beat:
    op, axis, purpose = call
    return Beat(rank, 1000 + rank, 0, 50, 412, part, at, op, axis, purpose, peer, 2, 0)


def report(where: RunLayout, statuses: Sequence[RankStatus]) -> tuple[str, list[str], list[int]]:
    """Headline, the other lines, the culprits."""
    found = HangReport(where, statuses)
    return found.headline(), found.text().splitlines()[2:], found.culprits


def test_the_chain_of_the_issue() -> None:
    """The pipeline of 16 ranks, tp 2 and pp 8: rank 9 stopped in the optimizer of a step that others have left."""
    where = scene(tp=2, pp=8, dp=1)
    statuses = []
    for rank in range(16):
        pp = rank // 2
        at = position(where.train_schedule, pp, "0F7")
        if rank == 9:
            statuses.append(RankStatus(rank, beat(rank, "optimizer"), answers=False))
        elif rank == 8:
            statuses.append(
                RankStatus(rank, beat(rank, "forward_backward", ("all_reduce", "tp", "mlp.down"), at=at), True, 300)
            )
        elif pp < 4:
            statuses.append(RankStatus(rank, beat(rank, "optimizer", ("all_reduce", "world", "step")), True, 301))
        else:
            call = ("recv", "pp_forward", "activations")
            statuses.append(RankStatus(rank, beat(rank, "forward_backward", call, peer=pp - 1, at=at), True, 302))
    headline, lines, culprits = report(where, statuses)
    assert culprits == [9]
    assert headline == "rank 9 (pp 4, dp 0, tp 1) does not answer; it was last seen in the optimizer of step 412"
    assert "  rank 11 (pp 5, dp 0, tp 1) waits for the forward of microbatch 7 from rank 9" in lines[:4]
    where_it_is = "in the forward of microbatch 7 of step 412"
    assert (
        f"  rank 8 (pp 4, dp 0, tp 0) waits for rank 9 in the all_reduce over tp (mlp.down), {where_it_is}" in lines[:4]
    )
    assert "  and 3 more ranks wait for these" in lines


def test_a_rank_that_answers_and_waits_for_nobody_holds_up_the_others() -> None:
    where = scene(tp=1, pp=1, dp=4)
    gradients = ("reduce_scatter", "dp", "gradients")
    statuses = [RankStatus(rank, beat(rank, "forward_backward", gradients), True, 300.0) for rank in range(4)]
    statuses[2] = RankStatus(2, beat(2, "data"), True, 310.0)
    headline, lines, culprits = report(where, statuses)
    assert culprits == [2]
    assert headline == "rank 2 (pp 0, dp 2, tp 0) is reading the data of step 412 for 310 seconds, and waits for nobody"
    assert lines[0].startswith("  rank 0 (pp 0, dp 0, tp 0) waits for rank 2 in the reduce_scatter over dp (gradients)")


def test_ranks_that_wait_for_each_other_are_a_circle() -> None:
    where = scene(tp=1, pp=2, dp=1)
    call = ("recv", "pp_backward", "activation gradients")
    at = [position(where.train_schedule, 0, "0B2"), position(where.train_schedule, 1, "0F3")]
    statuses = [
        RankStatus(0, beat(0, "forward_backward", call, peer=1, at=at[0]), True, 300.0),
        RankStatus(
            1, beat(1, "forward_backward", ("recv", "pp_forward", "activations"), peer=0, at=at[1]), True, 300.0
        ),
    ]
    headline, _, culprits = report(where, statuses)
    assert culprits == []
    assert headline == (
        "ranks wait for each other in a circle: rank 0 (pp 0, dp 0, tp 0) waits for the backward of microbatch 2 from rank 1, "
        "rank 1 (pp 1, dp 0, tp 0) waits for the forward of microbatch 3 from rank 0"
    )


def test_where_all_are_in_one_call_the_call_is_to_blame() -> None:
    where = scene(tp=2, pp=1, dp=1)
    call = ("all_reduce", "tp", "mlp.down")
    statuses = [RankStatus(rank, beat(rank, "forward_backward", call), True, 300.0) for rank in range(2)]
    headline, lines, culprits = report(where, statuses)
    assert culprits == [] and headline.endswith("a link or the backend has failed")
    assert all("in the all_reduce over tp (mlp.down) with its peers" in line for line in lines)


def test_a_call_between_nodes_names_the_nodes_whose_link_may_have_failed() -> None:
    where = scene(tp=1, pp=2, dp=2, ranks_per_node=2)
    call = ("all_reduce", "world", "step")
    statuses = [RankStatus(rank, beat(rank, "optimizer", call), True, 300.0) for rank in range(4)]
    headline, _, culprits = report(where, statuses)
    assert culprits == []
    assert headline.endswith(
        "a link or the backend has failed; the all_reduce over world (step) is between node 0 (ranks 0, 1) and node 1 (ranks 2, 3)"
    )


def test_where_only_devices_wait_the_rank_behind_is_named() -> None:
    where = scene(tp=1, pp=1, dp=4)
    statuses = [RankStatus(rank, beat(rank, "optimizer"), True, 300.0) for rank in range(4)]
    headline, _, culprits = report(where, statuses)
    assert culprits == [] and "the devices do not finish" in headline
    statuses[1] = RankStatus(1, beat(1, "data"), True, 300.0)
    headline, lines, culprits = report(where, statuses)
    assert culprits == [1]
    assert headline == "rank 1 (pp 0, dp 1, tp 0) is reading the data of step 412 for 300 seconds, and waits for nobody"
    assert lines[0] == "  rank 0 (pp 0, dp 0, tp 0) is in the optimizer of step 412"


def test_a_rank_that_nobody_has_seen_is_said_to_be_so() -> None:
    where = scene(tp=1, pp=1, dp=2)
    statuses = [
        RankStatus(0, beat(0, "optimizer", ("all_reduce", "world", "step")), True, 300.0),
        RankStatus(1, None, False),
    ]
    headline, lines, culprits = report(where, statuses)
    assert culprits == [1] and headline.endswith("does not answer, and nobody has seen what it was doing")
    of_rank_0 = "waits for rank 1 in the all_reduce over world (step), in the optimizer of step 412"
    assert lines == [f"  rank 0 (pp 0, dp 0, tp 0) {of_rank_0}"]


@pytest.mark.parametrize(
    ("part", "statuses"),
    [
        ("", "is not in a step yet"),
        ("checkpoint", "is in the checkpoint after step 412"),
        ("validation", "is in the validation after step 412"),
        ("forward_backward", "is between forwards and backwards of step 412"),
    ],
)
def test_every_part_has_words(part: str, statuses: str) -> None:
    where = scene(tp=1, pp=1, dp=1)
    _, lines, _ = report(where, [RankStatus(0, beat(0, part), True, 300.0)])
    assert lines == [f"  rank 0 (pp 0, dp 0, tp 0) {statuses}"]


@pytest.mark.parametrize("num_silent", [1, 256])
def test_a_report_looks_at_each_rank_of_a_call_once(num_silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All wait for the silent ones in one call over the world: compared pair by pair they would be the square of the ranks."""
    where, looked_at, is_in = scene(tp=8, pp=2, dp=32), [], HangReport._is_in

    def count(self: HangReport, rank: int, call: Beat) -> bool:
        looked_at.append(rank)
        return is_in(self, rank, call)

    monkeypatch.setattr(HangReport, "_is_in", count)
    call = ("all_reduce", "world", "step")
    statuses = [RankStatus(rank, beat(rank, "optimizer", call), rank >= num_silent, 300) for rank in range(512)]
    headline, lines, culprits = report(where, statuses)
    assert culprits == list(range(num_silent)) and headline.startswith("rank 0 (pp 0, dp 0, tp 0) does not answer")
    assert any(line.startswith(f"  rank {num_silent} ") and "waits for rank" in line for line in lines)
    assert len(looked_at) == 512
