"""The rank grid: which rank stands where, and who is in a group with whom."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.errors import TopologyError
from triaxis.engine.layout.rank_grid import AXES, ParallelSizes, RankGrid
from triaxis.engine.layout.shard_spec import ExpertPlace

SIZES = st.builds(
    ParallelSizes, tp=st.integers(1, 6), pp=st.integers(1, 6), dp=st.integers(1, 6), vpp=st.integers(1, 3)
)


def test_sixteen_ranks_by_hand() -> None:
    """The example of `engine/layout/rank_grid.py`."""
    grid = RankGrid(ParallelSizes(tp=2, pp=2, dp=4), ranks_per_node=8)
    assert grid.groups("tp") == tuple((rank, rank + 1) for rank in range(0, 16, 2))
    assert grid.groups("dp") == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))
    assert grid.groups("pp") == tuple((rank, rank + 8) for rank in range(8))
    assert grid.groups("dp", "tp") == (tuple(range(8)), tuple(range(8, 16)))
    assert grid.groups(*AXES) == (tuple(range(16)),)
    assert grid.end_stage_groups() == grid.groups("pp")
    assert [grid.node(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    at = grid.coordinates(13)
    assert (at.pp, at.dp, at.cp, at.tp) == (1, 2, 0, 1)
    assert str(at) == "pp 1, dp 2, tp 1"


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES)
def test_ranks_and_coordinates_are_one_to_one(sizes: ParallelSizes) -> None:
    grid = RankGrid(sizes)
    seen = set()
    for rank in range(sizes.world_size):
        at = grid.coordinates(rank)
        assert grid.rank(pp=at.pp, dp=at.dp, cp=at.cp, tp=at.tp) == rank
        seen.add(at)
    assert len(seen) == sizes.world_size == sizes.tp * sizes.pp * sizes.dp


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES)
def test_groups_of_any_axes_part_the_world(sizes: ParallelSizes) -> None:
    """Every rank is in exactly one group; its members differ in no other axis; the order is the same for everybody."""
    grid = RankGrid(sizes)
    for axes in (axes for count in range(len(AXES) + 1) for axes in combinations(AXES, count)):
        groups = grid.groups(*axes)
        assert sorted(rank for group in groups for rank in group) == list(range(sizes.world_size))
        others = [axis for axis in AXES if axis not in axes]
        for group in groups:
            assert list(group) == sorted(group)
            assert len({tuple(getattr(grid.coordinates(rank), axis) for axis in others) for rank in group}) == 1
        assert groups == grid.groups(*reversed(axes))
        assert list(groups) == sorted(groups)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES)
def test_neighbours_are_tensor_parallel_and_stages_are_far_apart(sizes: ParallelSizes) -> None:
    grid = RankGrid(sizes)
    assert all(group == tuple(range(group[0], group[0] + sizes.tp)) for group in grid.groups("tp"))
    for group in grid.groups("pp"):
        assert all(after - before == sizes.world_size // sizes.pp for before, after in pairwise(group))


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES)
def test_end_stage_groups_hold_the_first_and_last_stage(sizes: ParallelSizes) -> None:
    grid = RankGrid(sizes)
    ends = grid.end_stage_groups()
    assert len(ends) == sizes.tp * sizes.dp
    assert {len(group) for group in ends} == {min(2, sizes.pp)}
    for group in ends:
        stages = [grid.coordinates(rank).pp for rank in group]
        assert (stages[0], stages[-1]) == (0, sizes.pp - 1)
    in_a_v = RankGrid(replace(sizes, vpp=2, is_v=True)).end_stage_groups()
    assert in_a_v == tuple(group[:1] for group in ends)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, block_size=st.integers(1, 6))
def test_tp_blocks_cut_each_group_into_neighbours(sizes: ParallelSizes, block_size: int) -> None:
    grid = RankGrid(sizes)
    if sizes.tp % block_size:
        with pytest.raises(TopologyError, match=f"blocks of {block_size}"):
            grid.tp_blocks(block_size)
        return
    blocks = grid.tp_blocks(block_size)
    assert [rank for block in blocks for rank in block] == list(range(sizes.world_size))
    assert all(len(block) == block_size and len({rank // sizes.tp for rank in block}) == 1 for block in blocks)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, ranks_per_node=st.integers(1, 16), allow=st.booleans())
def test_nodes_are_whole_and_hold_whole_tp_groups_unless_allowed(
    sizes: ParallelSizes, ranks_per_node: int, allow: bool
) -> None:
    world_size = sizes.world_size
    per_node = min(ranks_per_node, world_size)
    whole = world_size % per_node == 0
    split = any(
        len({rank // per_node for rank in range(at, at + sizes.tp)}) > 1 for at in range(0, world_size, sizes.tp)
    )
    if not whole or (split and not allow):
        with pytest.raises(TopologyError, match="whole nodes" if not whole else "span two nodes"):
            RankGrid(sizes, ranks_per_node, allow_tp_across_nodes=allow)
        return
    grid = RankGrid(sizes, ranks_per_node, allow_tp_across_nodes=allow)
    assert grid.num_nodes * grid.ranks_per_node == world_size
    assert [grid.node(rank) for rank in range(world_size)] == sorted(grid.node(rank) for rank in range(world_size))


def test_a_message_about_nodes_says_what_to_do() -> None:
    with pytest.raises(
        TopologyError, match=r"parallel.tp = 8 must divide the 4 ranks of a node.*allow_tp_across_nodes"
    ):
        RankGrid(ParallelSizes(tp=8), ranks_per_node=4)


@pytest.mark.parametrize("name", ["tp", "pp", "dp", "dp_replicas", "cp", "ep", "etp", "vpp"])
def test_sizes_start_at_one(name: str) -> None:
    with pytest.raises(TopologyError, match=rf"parallel\.{name} = 0: sizes start at 1"):
        ParallelSizes(**{name: 0})


def test_experts_are_shared_by_neighbours_of_a_stage() -> None:
    sizes = ParallelSizes(tp=2, pp=2, dp=4, ep=2, etp=2)
    grid = RankGrid(sizes)
    assert grid.expert_blocks() == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))
    assert grid.expert_replicas()[:5] == ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12))
    assert (sizes.expert_dp, sizes.reduce_size("expert_dp"), sizes.reduce_size("dp")) == (2, 2, 4)
    assert sizes.expert_place(11) == ExpertPlace(2, 1, 2, 1)
    assert (str(sizes), sizes.product) == (
        "tp=2 pp=2 vpp=1 dp=4 ep=2 etp=2",
        "tp 2 x pp 2 x dp 4 (ep 2, etp 2)",
    )


def test_replicas_of_the_state_are_blocks_of_neighbours() -> None:
    sizes = ParallelSizes(tp=2, cp=2, pp=2, dp=4, dp_replicas=2, ep=4)
    grid = RankGrid(sizes)
    assert grid.shards("dp")[:3] == ((0, 2, 4, 6), (8, 10, 12, 14), (1, 3, 5, 7))
    assert grid.shards("expert_dp")[:3] == ((0, 4), (8, 12), (1, 5))
    assert grid.state_replicas()[:2] == ((0, 8), (1, 9)) and grid.state_replicas()[8:10] == ((16, 24), (17, 25))
    assert (sizes.owners("dp"), sizes.owners("expert_dp"), sizes.owner_axis("expert_dp")) == (4, 2, "expert_dp_shard")
    assert str(sizes) == "tp=2 cp=2 pp=2 vpp=1 dp=4 dp_replicas=2 ep=4"
    assert sizes.product == "tp 2 x cp 2 x pp 2 x dp 4 (2 replicas) (ep 4)"


@pytest.mark.parametrize(
    ("dp", "ep", "words"), [(6, 1, "must divide parallel.dp = 6"), (4, 2, "must divide the 2 ranks that hold the same")]
)
def test_replicas_of_the_state_that_ranks_cannot_share_evenly_are_refused(dp: int, ep: int, words: str) -> None:
    with pytest.raises(TopologyError, match=rf"parallel\.dp_replicas = 4 {words}"):
        ParallelSizes(dp=dp, dp_replicas=4, ep=ep)


def test_experts_that_the_ranks_of_a_stage_cannot_share_are_refused() -> None:
    with pytest.raises(TopologyError, match="ep x etp = 4, which must divide the 6 ranks"):
        ParallelSizes(dp=6, ep=4)


def test_context_parallel_ranks_are_between_tensor_and_data_parallel_ones() -> None:
    sizes = ParallelSizes(tp=2, cp=2, pp=2, dp=2)
    grid = RankGrid(sizes)
    assert (str(sizes), sizes.product) == ("tp=2 cp=2 pp=2 vpp=1 dp=2", "tp 2 x cp 2 x pp 2 x dp 2")
    assert grid.groups("cp")[:2] == ((0, 2), (1, 3)) and grid.groups("dp", "cp")[0] == (0, 2, 4, 6)
    assert str(grid.coordinates(15)) == "pp 1, dp 1, cp 1, tp 1"
    assert sizes.dp_cp == 4


def test_ranks_coordinates_and_axes_that_do_not_exist() -> None:
    grid = RankGrid(ParallelSizes(tp=2, dp=2))
    with pytest.raises(TopologyError, match=r"rank 4 does not exist.*ranks 0 to 3"):
        grid.coordinates(4)
    with pytest.raises(TopologyError, match="rank -1 does not exist"):
        grid.coordinates(-1)
    with pytest.raises(TopologyError, match="tp coordinate 2 does not exist: tp has size 2"):
        grid.rank(tp=2)
    with pytest.raises(TopologyError, match="axis 'vpp' does not exist; the axes are pp, dp, cp, tp"):
        grid.groups("vpp")


def test_more_ranks_than_can_be_listed_are_refused() -> None:
    with pytest.raises(TopologyError, match="is 80,000,000,000 ranks, and at most 1,048,576 are planned"):
        ParallelSizes(tp=8, pp=100_000, dp=100_000)
