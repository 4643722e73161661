"""Ranks that differ are named on all ranks before the first group is made."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from triaxis.engine.comm.store_agreement import compare_details, compare_facts, judge_group_counts, name_ranks
from triaxis.engine.comm.topology import Topology
from triaxis.engine.errors import PeerLostError, TopologyError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid


def test_ranks_are_written_as_runs() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(8)) == "ranks 0 to 7"
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0 to 2, 5 and 7 to 8"


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_answer_are_named_on_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped rank was a DistStoreError, with a key of the store in place of the rank."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    for kind, call in (
        ("facts", lambda store: compare_facts(store, rank, 6, {}, lambda _: None, 2)),
        ("digest", lambda store: compare_details(store, rank, 6, "{}", dict, lambda *_: "", 2)),
    ):
        store = dist.HashStore()
        store.set_timeout(timedelta(milliseconds=20))
        for other in (0, 1, 3):
            store.set(f"{kind}/{other}", "{}")
        with pytest.raises(PeerLostError, match=r"^ranks 2 and 4 to 5 \(node 1, 2\) did not answer within 0 s"):
            call(store)


def test_counts_that_differ_are_named() -> None:
    assert judge_group_counts([{"num_groups": 1}] * 4) is None
    problem = judge_group_counts([{"num_groups": count} for count in (2, 1, 1, 2)])
    assert problem is not None
    assert "  ranks 1 to 2: 1\n  ranks 0 and 3: 2\n" in problem


def told(rank: int) -> tuple[str, float]:
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    compare_facts(store, rank, 3, {"number": rank}, lambda every: None)
    again = dist.PrefixStore("again", store)
    with pytest.raises(TopologyError) as error:
        compare_facts(again, rank, 3, {"number": rank}, lambda every: ",".join(str(facts["number"]) for facts in every))
    return str(error.value), time.monotonic()


@pytest.mark.distributed
def test_every_rank_raises_the_verdict_and_rank_0_first() -> None:
    texts, seconds = zip(*run_ranks(told, 3), strict=True)
    assert texts == ("0,1,2",) * 3
    assert seconds[0] == min(seconds)


def after_a_group_of_few(rank: int, members: list[int]) -> str:
    """Make a group that only its members make, as user code may, then a topology."""
    if rank in members:
        dist.new_group(members, use_local_synchronization=True)
    try:
        topology = Topology(RankGrid(ParallelSizes(tp=2, dp=2)), rank, torch.device("cpu"))
    except TopologyError as error:
        return str(error)
    topology.axis("tp").all_reduce(torch.ones(1), "test").wait()
    return ""


@pytest.mark.distributed
def test_a_group_of_a_few_ranks_before_the_topology_is_an_error_not_a_hang() -> None:
    for text in run_ranks(after_a_group_of_few, 4, [1, 3], timeout_seconds=20):
        assert "ranks 0 and 2: 1\n  ranks 1 and 3: 2" in text
    assert run_ranks(after_a_group_of_few, 4, [0, 1, 2, 3], timeout_seconds=20) == [""] * 4
