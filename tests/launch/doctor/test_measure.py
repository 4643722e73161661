"""What two ranks find out together: rates, clocks, whether a folder is one and the same."""

import json
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests import netns
from tests.harness import run_ranks
from triaxis.engine.comm.texts import gather_text
from triaxis.engine.comm.topology import Topology
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.numerics.precision import DTYPES
from triaxis.launch.doctor.facts import collect, driver
from triaxis.launch.doctor.measure import (
    check_folders,
    gather_rates,
    group_rates,
    measure_clock,
    path_rates,
)
from triaxis.launch.doctor.phases import node_paths
from triaxis.launch.doctor.records import GroupRate, NodeClock, RankFacts, RootFacts, Size

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")

AHEAD_SECONDS = 5.0
SIZES = [
    Size("dp", "all_reduce", 4096, 7),
    Size("dp", "all_gather", 1024, 3),
    Size("dp", "reduce_scatter", 8192, 1),
    Size("pp_forward", "send", 2048, 4),
    Size("pp_backward", "send", 2048, 4),
]


@dataclass(frozen=True, slots=True)
class Found:
    texts: list[str]
    clock: NodeClock | None
    roots: tuple[RootFacts, ...]
    groups: list[GroupRate]
    paths: list[GroupRate]
    posted_outside: int


def cp_rates(rank: int) -> list[GroupRate]:
    """Of a gather of keys and values, of the sum of their gradients, of an exchange of heads, and of one of experts' rows."""
    topology = Topology(RankGrid(ParallelSizes(cp=2, dp=2, ep=2)), rank, CPU, has_experts=True)
    sizes = [
        Size("cp", "all_gather", 4096, 8),
        Size("cp", "reduce_scatter", 8192, 4),
        Size("cp", "all_to_all", 8192, 4),
        Size("experts", "all_to_all_rows", 8192, 4),
    ]
    return gather_rates(topology.axis("world"), group_rates(topology, sizes, DTYPES["fp32"]), CPU)


def test_groups_that_share_samples_have_rates() -> None:
    for rates in run_ranks(cp_rates, 4):
        found = [(one.axis, one.op, one.ranks, one.num_bytes) for one in rates]
        assert sorted(found) == [
            *(
                ("cp", op, ranks, size)
                for op, size in (("all_gather", 4096), ("all_to_all", 8192), ("reduce_scatter", 8192))
                for ranks in ((0, 1), (2, 3))
            ),
            *(("experts", "all_to_all_rows", ranks, 8192) for ranks in ((0, 1), (2, 3))),
        ]
        assert all(one.seconds > 0 and one.bytes_per_second > 0 for one in rates)


def look(rank: int, folder: Path) -> Found:
    """Two nodes of two ranks; node 1's clock is ahead."""
    grid = RankGrid(ParallelSizes(pp=2, dp=2), ranks_per_node=2)
    topology = Topology(grid, rank, CPU)
    world, node = topology.axis("world"), grid.node(rank)
    texts = gather_text(world, "é" * 5000 * rank, CPU, "test", most_bytes=None)

    def clock() -> float:
        return time.time() + (AHEAD_SECONDS if node == 1 else 0.0)

    roots = {"shared": folder / "shared" / "not yet there", "file": folder / "file"}
    seen = check_folders(topology, roots, patience_seconds=0.2)
    rates = group_rates(topology, SIZES, DTYPES["fp32"])
    between = path_rates(world, node_paths(2, grid.world_size), Size("world", "send", 4096, 0), CPU)
    return Found(
        texts,
        measure_clock(topology, clock),
        seen,
        gather_rates(world, rates, CPU),
        gather_rates(world, between, CPU),
        len([event for event in topology.ledger.posted if event.purpose != "doctor"]),
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "shared").mkdir()
    (folder / "file").mkdir()
    results: list[Found] = run_ranks(look, 4, folder)
    assert not [path for path in folder.rglob("*") if path.is_file()], "the test files are gone"
    assert not (folder / "shared" / "not yet there").exists(), "and nothing was made"
    return results


def test_texts_of_any_length_arrive_in_rank_order(found: list[Found]) -> None:
    assert all(one.texts == ["é" * 5000 * rank for rank in range(4)] for one in found)


def test_a_clock_that_is_ahead_is_found_within_the_stated_precision(found: list[Found]) -> None:
    for rank, one in enumerate(found):
        if rank % 2:
            assert one.clock is None
            continue
        assert one.clock is not None
        wanted = AHEAD_SECONDS if rank == 2 else 0.0
        assert abs(one.clock.offset_seconds - wanted) <= one.clock.precision_seconds + 1e-5


def test_a_folder_that_all_see_is_shared_wherever_it_begins(found: list[Found]) -> None:
    for one in found:
        shared, other = one.roots
        assert (shared.sees_rank_0, shared.seen_by_rank_0, shared.problem) == (True, True, "")
        assert shared.path.endswith("/shared")
        assert (other.sees_rank_0, other.seen_by_rank_0) == (True, True)
        assert shared.free_bytes > 0


def test_each_group_and_path_is_told_once_and_to_all(found: list[Found]) -> None:
    grid = RankGrid(ParallelSizes(pp=2, dp=2), ranks_per_node=2)
    assert all(one.groups == found[0].groups and one.paths == found[0].paths for one in found)
    assert all(one.posted_outside == 0 for one in found)
    by_kind: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for one in found[0].groups:
        by_kind.setdefault((one.axis, one.op), set()).add(one.ranks)
    assert by_kind["dp", "all_reduce"] == set(grid.groups("dp"))
    assert by_kind["dp", "all_gather"] == set(grid.groups("dp"))
    assert by_kind["dp", "reduce_scatter"] == set(grid.groups("dp"))
    assert by_kind["pp_forward", "send"] == set(grid.groups("pp"))
    assert by_kind["pp_backward", "send"] == {(last, first) for first, last in grid.groups("pp")}
    assert {one.ranks for one in found[0].paths} == {pair for phase in node_paths(2, 4) for pair in phase}


def test_bus_bandwidth_is_ring_bytes_by_time(found: list[Found]) -> None:
    ring = {"all_reduce": 4096, "all_gather": 1024, "reduce_scatter": 4096, "send": 2048}
    for one in found[0].groups:
        assert one.bytes_per_second * one.seconds == pytest.approx(ring[one.op])
        assert one.calls == next(size.calls for size in SIZES if (size.axis, size.op) == (one.axis, one.op))


def apart(rank: int, folder: Path, read_only: bool) -> tuple[RootFacts, ...]:
    """Each rank is a node; on rank 1's another disk is mounted there."""
    topology = Topology(RankGrid(ParallelSizes(dp=2), 1), rank, CPU)
    if rank == 1:
        netns.mount_another_disk(folder, read_only=read_only)
    return check_folders(topology, {"runs": folder}, patience_seconds=0.2)


def test_a_folder_on_another_disk_is_not_the_same(tmp_path: Path) -> None:
    with netns.hosts(0):  # whoever may make hosts may mount disks
        (first,), (second,) = run_ranks(apart, 2, tmp_path, False)
    assert (first.sees_rank_0, first.seen_by_rank_0, first.problem) == (True, True, "")
    assert (second.sees_rank_0, second.seen_by_rank_0, second.problem) == (False, False, "")


def test_a_folder_that_cannot_be_written_to_says_why(tmp_path: Path) -> None:
    with netns.hosts(0):
        (first,), (second,) = run_ranks(apart, 2, tmp_path, True)
    assert (first.problem, second.problem) == ("", "Read-only file system")
    assert not second.sees_rank_0


def test_facts_of_a_rank_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"12345")
    files = [tmp_path / "a.bin", tmp_path / "b.bin"]
    facts = collect(3, 1, CPU, dtype=torch.float32, data_files=files, first_of_node=True)
    assert facts.corpora == {str(tmp_path / "a.bin"): 5, str(tmp_path / "b.bin"): None}
    assert facts.equal["torch"] == torch.__version__
    assert facts.equal["device"] == "cpu"
    assert facts.gpu is None
    # A CUDA build's own version may have a suffix that its package has not.
    assert {one.name: one.version for one in facts.packages}["torch"] == metadata.version("torch")
    assert RankFacts.from_json(json.loads(json.dumps(asdict(facts)))) == facts


def test_the_version_of_the_driver(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 13\n"
    )
    assert driver(version) == "580.95.05"
    assert driver(tmp_path / "none") == "unknown"
