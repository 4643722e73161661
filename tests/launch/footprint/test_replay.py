"""Ledgers of all ranks replayed under NCCL's rules: those of the engine meet, changed ones do not."""

from collections.abc import Sequence

import pytest
import torch

from tests.harness import run_ranks
from tests.launch.footprint.test_added_up import thin
from tests.parity.cases import Case
from triaxis.engine.comm.ledger import Event
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.errors import ScheduleError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.launch.footprint.replay import Replayed, replay
from triaxis.launch.footprint.run import Footprint, Footprints
from triaxis.models.gpt.chunk import build_chunks

Logs = dict[int, tuple[Event, ...]]

TWO = RankGrid(ParallelSizes(pp=2))


def every_rank(rank: int, case: Case) -> tuple[list[Footprint], list[Footprint]]:
    """(each rank for itself, one rank of each stage), in a process without a group of its own."""
    footprints = Footprints(thin(case), build_chunks)
    return [footprints.of(one) for one in range(case.world_size)], footprints.of_stages()


@pytest.fixture(scope="module")
def of_eight() -> tuple[list[Footprint], list[Footprint]]:
    (found,) = run_ranks(every_rank, 1, EIGHT, timeout_seconds=600)
    return found  # type: ignore[no-any-return]


EIGHT = Case("llama", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, global_batch_size=4, dtype="bf16")
GRID = RankGrid(parallel_sizes(EIGHT.config()))
KV_HEADS = EIGHT.config().model.kv_heads


def logs_of(found: Sequence[Footprint]) -> Logs:
    return {rank: footprint.log for rank, footprint in enumerate(found)}


@pytest.mark.distributed
def test_all_ranks_meet(of_eight: tuple[list[Footprint], list[Footprint]]) -> None:
    ranks, _ = of_eight
    met = replay(logs_of(ranks), GRID, KV_HEADS)
    # 4 pipelines, 3 boundaries between chunks, 2 microbatches.
    assert met.messages == {"pp_forward": 24, "pp_backward": 24}
    # Each collective was called by two ranks, the world's two by eight.
    calls = sum(event.peer < 0 for footprint in ranks for event in footprint.events)
    assert sum(met.collectives.values()) - met.collectives["world"] == (calls - 16) // 2


@pytest.mark.distributed
def test_a_rank_of_a_stage_stands_for_the_others(of_eight: tuple[list[Footprint], list[Footprint]]) -> None:
    ranks, stages = of_eight
    for footprint in ranks:
        assert footprint.log == stages[footprint.coordinates.pp].log
    met = replay({GRID.rank(pp=pp): found.log for pp, found in enumerate(stages)}, GRID, KV_HEADS)
    assert met.messages == {"pp_forward": 6, "pp_backward": 6}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", tp=2, pp=4, dp=2, global_batch_size=12, dtype="bf16"),
        Case("llama", tp=4, pp=2, vpp=2, dp=2, global_batch_size=10, sequence_parallel=True),
        Case("qwen", tp=2, pp=4, dp=2, schedule="gpipe", global_batch_size=10, recompute=("full", "uniform", 1)),
    ],
    ids=str,
)
def test_sixteen_ranks_meet(case: Case) -> None:
    ((ranks, _),) = run_ranks(every_rank, 1, case, timeout_seconds=600)
    config = case.config()
    met = replay(logs_of(ranks), RankGrid(parallel_sizes(config)), config.model.kv_heads)
    boundaries = case.pp * case.vpp - 1
    per_direction = case.tp * case.global_batch_size * boundaries
    assert met.messages == {"pp_forward": per_direction, "pp_backward": per_direction}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_ranks_that_share_experts_meet(dispatch: str) -> None:
    """Rows by all-to-all are of another number on each rank."""
    case = Case("deepseek", tp=2, dp=4, ep=4, dispatch=dispatch, global_batch_size=8)
    ((ranks, _),) = run_ranks(every_rank, 1, case, timeout_seconds=600)
    config, logs = case.config(), logs_of(ranks)
    grid, kv_heads = RankGrid(parallel_sizes(config)), config.model.kv_heads
    met = replay(logs, grid, kv_heads, has_experts=True)
    # Two groups of four ranks, two microbatches, three layers, with seven calls each way together.
    assert met.collectives["experts"] == 2 * 2 * 3 * 7
    assert met.collectives["sample"] == 4 * 2 * 3
    with pytest.raises(ScheduleError, match="a collective must be the same everywhere"):
        replay(without(logs, 3, dispatch), grid, kv_heads, has_experts=True)


def changed(logs: Logs, rank: int, op: str, **values: object) -> Logs:
    """Rank's first post of the operation with other values."""
    log = list(logs[rank])
    index = next(i for i, event in enumerate(log) if event.phase == "post" and event.op == op)
    log[index] = log[index]._replace(**values)  # type: ignore[arg-type]
    return {**logs, rank: tuple(log)}


def without(logs: Logs, rank: int, op: str) -> Logs:
    """Rank's log without its first call of the operation and the waits for it."""
    call = next(event.call for event in logs[rank] if event.op == op)
    return {**logs, rank: tuple(event for event in logs[rank] if event.call != call)}


@pytest.mark.distributed
def test_planted_differences_are_found(of_eight: tuple[list[Footprint], list[Footprint]]) -> None:
    logs = logs_of(of_eight[0])
    with pytest.raises(ScheduleError, match="a collective must be the same everywhere"):
        replay(changed(logs, 3, "all_gather", numel=1), GRID, KV_HEADS)
    with pytest.raises(ScheduleError, match="a collective must be the same everywhere"):
        replay(changed(logs, 3, "reduce_scatter", dtype=torch.float64), GRID, KV_HEADS)
    with pytest.raises(ScheduleError, match="not the same to both"):
        replay(changed(logs, 4, "send", numel=1), GRID, KV_HEADS)
    with pytest.raises(ScheduleError, match=r"hang|must be the same"):
        replay(without(logs, 2, "all_reduce"), GRID, KV_HEADS)
    with pytest.raises(ScheduleError, match="every rank would hang"):
        replay(without(logs, 4, "send"), GRID, KV_HEADS)
    with pytest.raises(ScheduleError, match="no group of"):
        replay(changed(logs, 0, "all_reduce", axis="ep"), GRID, KV_HEADS)


def log(*calls: str) -> tuple[Event, ...]:
    """`send+recv` is a group call, `wait 0` waits for call 0, `reduce 5` is a collective of 5 elements on `pp_forward`."""
    events: list[Event] = []
    number = 0
    posted: dict[int, Event] = {}
    for words in calls:
        verb, _, value = words.partition(" ")
        if verb == "wait":
            events.append(posted[int(value)]._replace(phase="wait"))
            continue
        first = number
        for op in verb.split("+"):
            peer = -1 if op == "reduce" else 1
            numel = int(value or 1)
            event = Event("post", number, op, "pp_forward", "", torch.float32, numel, 2, peer, first)
            posted[number] = event
            events.append(event)
            number += 1
    return tuple(events)


def other_end(events: Sequence[Event]) -> tuple[Event, ...]:
    return tuple(event if event.peer < 0 else event._replace(peer=0) for event in events)


def two(first: Sequence[Event], second: Sequence[Event]) -> Replayed:
    return replay({0: tuple(first), 1: other_end(second)}, TWO, None)


def test_receives_before_sends_hang_unless_they_are_one_group_call() -> None:
    assert two(log("recv+send"), log("recv+send")).messages == {"pp_forward": 2}
    # gloo runs this.
    with pytest.raises(ScheduleError, match="every rank would hang"):
        two(log("recv", "send"), log("recv", "send"))


def test_a_wait_for_what_the_peer_posts_after_its_own_wait() -> None:
    assert two(log("send", "wait 0", "recv"), log("recv", "wait 0", "send")).messages == {"pp_forward": 2}
    with pytest.raises(ScheduleError, match="rank 0 waits for its recv"):
        two(log("recv", "wait 0", "send"), log("recv", "wait 0", "send"))


def test_a_head_that_is_not_met_holds_up_what_is_behind_it() -> None:
    assert two(log("reduce", "send"), log("reduce", "recv")).collectives == {"pp_forward": 1}
    with pytest.raises(ScheduleError, match="blocks 1 later call"):
        two(log("reduce", "send"), log("recv", "reduce"))


def test_messages_meet_in_order_whatever_they_were_meant_to_be() -> None:
    with pytest.raises(ScheduleError, match="no tags"):
        two(log("send 3", "send 4"), log("recv 4", "recv 3"))
