"""Links: where the ranks of a group are decides how fast they are."""

from dataclasses import replace

import pytest

from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.models.predict.step_time.cluster import cluster_of
from triaxis.models.predict.step_time.links import Link, Links


def links(sizes: ParallelSizes, oversubscription: float = 1.0) -> Links:
    cluster = replace(cluster_of(f"{sizes.world_size}xH100"), oversubscription=oversubscription)
    return Links(cluster, cluster.load_device(), RankGrid(sizes, cluster.gpus_per_node))


def test_seconds_are_bytes_and_calls() -> None:
    assert Link(100e9, 1e-5).seconds(1e9, calls=3) == pytest.approx(0.01 + 3e-5)


def test_groups_of_a_node_use_nvlink_and_others_the_adapters_of_their_ranks() -> None:
    of = links(ParallelSizes(tp=4, dp=8))
    assert of.of_axes("tp").bytes_per_s == pytest.approx(360e9)
    # Two ranks of each data-parallel group share a node: two adapters carry its ring.
    assert of.of_axes("dp").bytes_per_s == pytest.approx(2 * 47e9)
    assert of.of_axes("dp").call_seconds > of.of_axes("tp").call_seconds
    assert links(ParallelSizes(tp=4, dp=8), 2.0).of_axes("dp").bytes_per_s == pytest.approx(47e9)


def test_whole_nodes_are_as_fast_as_nvlink_allows() -> None:
    assert links(ParallelSizes(dp=16)).of_axes("dp").bytes_per_s == pytest.approx(360e9)


def test_messages_between_stages() -> None:
    assert links(ParallelSizes(pp=8)).hand_over().bytes_per_s == pytest.approx(360e9)
    assert links(ParallelSizes(tp=8, pp=2)).hand_over().bytes_per_s == pytest.approx(47e9)
