"""The estimate of NCCL's buffers: which communicators a rank has, and how many channels they connect."""

from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.models.predict.communicators import (
    MESSAGE_CHANNELS,
    MIB,
    RING_CHANNELS,
    communicator_bytes,
    communicators,
    connections_of,
)

CONNECTION_BYTES = 12 * MIB


def axes_of(sizes: ParallelSizes, rank: int, kv_heads: int | None = None) -> list[list[str]]:
    return [axes for _, axes in communicators(RankGrid(sizes), rank, kv_heads)]


def test_axes_with_the_same_ranks_share_a_communicator() -> None:
    assert axes_of(ParallelSizes(), 0) == []
    assert axes_of(ParallelSizes(tp=4), 0) == [["world", "tp"]]
    assert axes_of(ParallelSizes(dp=2, tp=2), 0) == [["world"], ["tp"], ["dp"]]
    two_stages = [["world", "pp", "ends"], ["pp_forward"], ["pp_backward"]]
    assert axes_of(ParallelSizes(pp=2), 1) == two_stages
    three_stages = [["world", "pp"], ["pp_forward"], ["pp_backward"]]
    assert axes_of(ParallelSizes(pp=3), 1) == three_stages, "the middle stage has no end to share with"
    assert axes_of(ParallelSizes(pp=3), 2) == [*three_stages, ["ends"]]
    assert axes_of(ParallelSizes(tp=8), 0, kv_heads=2) == [["world", "tp"], ["kv_replicas"]]


def test_channels_are_nccls_own_or_what_the_options_allow() -> None:
    assert connections_of(["tp"], 8) == connections_of(["world"], 8) == RING_CHANNELS
    assert connections_of(["dp"], 8) == 16
    assert connections_of(["pp_forward"], 2) == 4 + 4, "a ring, and messages with the one neighbour there is"
    assert connections_of(["pp_backward"], 4) == 4 + 2 * 4
    assert connections_of(["pp"], 4) == 0, "generation connects it, training does not"
    assert connections_of(["pp", "ends"], 2) == RING_CHANNELS
    assert MESSAGE_CHANNELS > 4


def test_a_rank_holds_the_sum_of_its_communicators() -> None:
    assert communicator_bytes(ParallelSizes(), None) == (0,)
    assert communicator_bytes(ParallelSizes(tp=8), None) == (RING_CHANNELS * CONNECTION_BYTES,)
    first, *middle, last = communicator_bytes(ParallelSizes(tp=8, pp=4, dp=4), None)
    # world and tp; dp; two communicators of messages.
    connections = 2 * RING_CHANNELS + 16 + 2 * 12
    assert middle == [connections * CONNECTION_BYTES] * 2
    assert first == last == (connections + RING_CHANNELS) * CONNECTION_BYTES, "and the ends"


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 6),
    dp=st.integers(1, 5),
    cp=st.integers(1, 4),
    kv_heads=st.sampled_from([None, 1, 2, 4]),
    replicas=st.sampled_from([1, 2, 3]),
)
def test_a_small_grid_stands_for_the_whole_one(
    tp: int, pp: int, dp: int, cp: int, kv_heads: int | None, replicas: int
) -> None:
    sizes = ParallelSizes(tp=tp, pp=pp, dp=dp * replicas, dp_replicas=replicas, cp=cp)
    grid = RankGrid(sizes)
    by_rank = [
        CONNECTION_BYTES
        * sum(connections_of(axes, len(ranks)) for ranks, axes in communicators(grid, grid.rank(pp=stage), kv_heads))
        for stage in range(pp)
    ]
    assert communicator_bytes(sizes, kv_heads) == tuple(by_rank)


def test_ranks_that_share_experts_have_groups_of_their_own() -> None:
    def experts_of(sizes: ParallelSizes) -> list[list[str]]:
        return [axes for _, axes in communicators(RankGrid(sizes), 0, None, has_experts=True)]

    assert experts_of(ParallelSizes(dp=4, ep=4)) == [["world", "dp", "experts"]]
    assert experts_of(ParallelSizes(tp=2, dp=2, ep=2)) == [["world"], ["tp", "sample", "experts"], ["dp", "expert_dp"]]
    assert experts_of(ParallelSizes(dp=4, ep=2)) == [["world", "dp"], ["experts"], ["expert_dp"]]


@given(
    tp=st.sampled_from([1, 2, 3]),
    dp=st.sampled_from([1, 2, 4, 6, 8]),
    ep=st.sampled_from([1, 2, 3, 4, 8]),
    replicas=st.sampled_from([1, 2, 3]),
)
def test_a_small_grid_has_the_connections_of_a_large_one_with_experts(tp: int, dp: int, ep: int, replicas: int) -> None:
    if tp * dp % ep:
        return
    sizes = ParallelSizes(tp=tp, dp=dp * replicas, dp_replicas=replicas, ep=ep)
    groups = communicators(RankGrid(sizes), 0, None, has_experts=True)
    counted = sum(connections_of(axes, len(ranks)) for ranks, axes in groups) * CONNECTION_BYTES
    assert communicator_bytes(sizes, None, has_experts=True) == (counted,)
