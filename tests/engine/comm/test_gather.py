"""Rows of all ranks on rank 0, in rank order, by three short calls."""

from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from triaxis.engine.comm.gather import Gathering
from triaxis.engine.comm.topology import Topology
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")


def gather(rank: int, sizes: ParallelSizes) -> tuple[list[Any] | None, list[tuple[str, int]]]:
    topology = Topology(RankGrid(sizes), rank, CPU)
    topology.ledger.reset()
    gathering = Gathering(topology, torch.tensor([rank, 100 + rank], dtype=torch.int64), "test")
    is_under_way = len(topology.ledger.posted)
    rows = gathering.finish()
    assert is_under_way == min(1, len(topology.ledger.posted)), "the first call is posted before anybody waits"
    return None if rows is None else rows.tolist(), [(event.axis, event.numel) for event in topology.ledger.posted]


@pytest.mark.parametrize(
    ("sizes", "calls_of_rank_0"),
    [
        (ParallelSizes(tp=2, pp=2, dp=2), [("tp", 2), ("pp", 4), ("dp", 8)]),
        (ParallelSizes(pp=2, dp=3), [("pp", 2), ("dp", 4)]),
        (ParallelSizes(dp=3), [("dp", 2)]),
    ],
)
def test_rank_0_has_the_rows_of_all_ranks_in_their_order(
    sizes: ParallelSizes, calls_of_rank_0: list[tuple[str, int]]
) -> None:
    (rows, calls), *others = run_ranks(gather, sizes.world_size, sizes)
    assert rows == [[rank, 100 + rank] for rank in range(sizes.world_size)]
    assert calls == calls_of_rank_0
    grid = RankGrid(sizes)
    for rank, (seen, own_calls) in enumerate(others, start=1):
        at = grid.coordinates(rank)
        assert seen is None
        allowed = {"tp"} | ({"pp"} if at.tp == 0 else set()) | ({"dp"} if at.tp == at.pp == 0 else set())
        assert own_calls == [call for call in calls_of_rank_0 if call[0] in allowed]


def test_one_rank_calls_nothing() -> None:
    topology = Topology(RankGrid(ParallelSizes()), 0, CPU)
    rows = Gathering(topology, torch.tensor([1.5, 2.5]), "test").finish()
    assert rows is not None and rows.tolist() == [[1.5, 2.5]]
    assert topology.ledger.posted == []
