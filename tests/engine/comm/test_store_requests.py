"""What a rank asks the store where ranks meet: for its own groups and no others."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.counting_store import CountingStore
from tests.harness import run_ranks
from triaxis.engine.comm.topology import Topology
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid

pytestmark = pytest.mark.distributed


def requests_of(rank: int, sizes: ParallelSizes, folder: str) -> tuple[Counter[str], Counter[str]]:
    """Requests for the default group, and those for the groups of a topology."""
    dist.barrier()  # a rank that leaves while another still connects would end that one
    dist.destroy_process_group()
    requests: Counter[str] = Counter()
    store = CountingStore(dist.FileStore(str(Path(folder) / "store"), sizes.world_size), requests)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=sizes.world_size)
    for_default = Counter(requests)
    Topology(RankGrid(sizes), rank, torch.device("cpu"))
    return for_default, requests - for_default


@pytest.mark.parametrize("sizes", [ParallelSizes(tp=2, dp=2), ParallelSizes(tp=2, pp=2, dp=2)])
def test_a_rank_asks_for_the_members_of_its_own_groups(sizes: ParallelSizes, tmp_path: Path) -> None:
    """gloo joins all members of a group with each other: one address to set, one to get from each member, itself too."""
    groups = [sizes.world_size, 2, 2] + ([2, 2, 2] if sizes.pp == 2 else [])
    for rank, (for_default, for_topology) in enumerate(run_ranks(requests_of, sizes.world_size, sizes, str(tmp_path))):
        assert for_default == {"set": 1, "wait": sizes.world_size, "get": sizes.world_size}
        # The ends of a pipeline of two are the pipeline: they share its group.
        # And the comparison of group counts: every rank writes its own and reads the verdict, rank 0 reads those of all.
        comparison = {"set": 2, "get": sizes.world_size + 1} if rank == 0 else {"set": 1, "get": 1}
        assert for_topology == {
            "set": len(groups) + comparison["set"],
            "wait": sum(groups),
            "get": sum(groups) + comparison["get"],
            "add": 1,
        }
