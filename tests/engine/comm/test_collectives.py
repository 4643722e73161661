"""Collectives: results, order of sums, and a ledger that says what was really called."""

import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness import RankFailedError, run_ranks
from triaxis.engine.comm.backends import Message
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import Ledger
from triaxis.engine.comm.texts import TEXT_BYTES, announce, gather_text
from triaxis.engine.comm.topology import Topology
from triaxis.engine.errors import TopologyError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")


class CountCalls(TorchDispatchMode):
    """Counts the c10d ops that torch itself dispatches, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.names.append(function._schema.name.removeprefix("c10d::"))
        return function(*args, **(kwargs or {}))


def every_verb(rank: int, device: str = "cpu", staged: bool = False, size: int = 4) -> dict[str, Any]:
    where = torch.device(device, 0)
    topology = Topology(RankGrid(ParallelSizes(tp=size)), rank, where, staged=staged)
    axis = topology.axis("tp")
    topology.ledger.reset()
    with CountCalls() as calls, where:
        mine = torch.arange(3.0) + 10 * rank
        results: dict[str, Any] = {
            "sum": axis.all_reduce(mine.clone(), "test").wait(),
            "max": axis.all_reduce(mine.clone(), "test", op="max").wait(),
            "gather": axis.all_gather(mine, "test").wait(),
            "scatter": axis.reduce_scatter(torch.arange(2.0 * size) * (rank + 1), "test").wait(),
            "blocks": axis.all_to_all(torch.arange(2.0 * size).view(size, 2) + 100 * rank, "test").wait(),
            "broadcast": axis.broadcast(mine.clone(), size - 2, "test").wait(),
            "sum_values": axis.sum_values([1.0, rank], where, "test"),
        }
        flat = torch.arange(2.0 * size) * (rank + 1)
        axis.reduce_scatter(flat, "test", out=flat[2 * rank : 2 * rank + 2]).wait()
        results["scatter in place"] = flat
        own = torch.zeros(2 * size)
        own[2 * rank : 2 * rank + 2] = rank + 1.0
        results["gather in place"] = axis.all_gather(own[2 * rank : 2 * rank + 2], "test", out=own).wait()
        received = torch.empty(2)
        right, left = (rank + 1) % size, (rank - 1) % size
        pending = axis.exchange(
            [Message("send", torch.full((2,), float(rank)), right), Message("recv", received, left)], "x"
        )
        results["exchange"] = [one.wait() for one in pending][1]
    assert all(value.device.type == where.type for value in results.values() if isinstance(value, torch.Tensor))
    results = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in results.items()}
    results["c10d"] = calls.names
    results["ledger"] = [(event.phase, event.op, event.numel) for event in topology.ledger.events]
    return results


def check_every_verb(found: list[dict[str, Any]]) -> None:
    """What each rank's verbs must give, over as many ranks as there are."""
    size = len(found)
    times = sum(range(1, size + 1))
    for rank, got in enumerate(found):
        mine = (2 * rank, 2 * rank + 1)
        assert got["sum"].tolist() == [sum(10.0 * r + i for r in range(size)) for i in range(3)]
        assert got["max"].tolist() == [10.0 * (size - 1) + i for i in range(3)]
        assert got["gather"].tolist() == [10.0 * r + i for r in range(size) for i in range(3)]
        assert got["scatter"].tolist() == [float(times * i) for i in mine]
        assert got["blocks"].tolist() == [[100.0 * r + i for i in mine] for r in range(size)]
        assert got["broadcast"].tolist() == [10.0 * (size - 2) + i for i in range(3)]
        assert got["sum_values"] == [size, sum(range(size))]
        expected = [float(i * (rank + 1)) for i in range(2 * size)]
        expected[2 * rank : 2 * rank + 2] = [float(times * i) for i in mine]
        assert got["scatter in place"].tolist() == expected
        assert got["gather in place"].tolist() == [1.0 + r for r in range(size) for _ in range(2)]
        assert got["exchange"].tolist() == [(rank - 1) % size] * 2


def test_every_verb_on_four_ranks() -> None:
    found = run_ranks(every_verb, 4)
    check_every_verb(found)
    for got in found:
        posted = [(op, numel) for phase, op, numel in got["ledger"] if phase == "post"]
        assert posted == [
            ("all_reduce", 3),
            ("all_reduce", 3),
            ("all_gather", 3),
            ("reduce_scatter", 8),
            ("all_to_all", 8),
            ("broadcast", 3),
            ("all_reduce", 2),
            ("reduce_scatter", 8),
            ("all_gather", 2),
            ("send", 2),
            ("recv", 2),
        ]
        # One c10d op for each line of the ledger, no more: gloo's reduce-scatter goes out as an all-to-all.
        names = {
            "all_reduce": "allreduce_",
            "reduce_scatter": "alltoall_base_",
            "all_to_all": "alltoall_base_",
            "broadcast": "broadcast_",
            "send": "send",
        }
        names |= {"recv": "recv_", "all_gather": "_allgather_base_"}
        assert got["c10d"] == [names[op] for op, _ in posted]


def test_a_one_rank_axis_is_the_identity_and_calls_nothing() -> None:
    axis = Axis("tp", [0], 0, None, Ledger())
    x = torch.arange(4.0)
    assert axis.all_reduce(x, "a").wait() is x
    assert axis.all_gather(x, "a").wait() is x
    assert axis.reduce_scatter(x, "a").wait() is x
    assert axis.all_to_all(x, "a").wait() is x
    assert axis.broadcast(x, 0, "a").wait() is x
    assert axis.sum_values([1.0, 2.0], CPU, "a") == [1.0, 2.0]
    assert gather_text(axis, "why", CPU, "a") == ["why"] and announce(axis, "where", CPU, "a") == "where"
    assert axis.ledger.events == []


def every_text(rank: int) -> dict[str, Any]:
    axis = Topology(RankGrid(ParallelSizes(tp=4)), rank, CPU).axis("tp")
    results: dict[str, Any] = {}
    for name, told in (
        ("nobody", ""),
        ("one", "größer" if rank == 2 else ""),
        ("all", str(rank) * (rank + 1)),
        ("long", "x" * (TEXT_BYTES + rank)),
    ):
        axis.ledger.reset()
        results[name] = gather_text(axis, told, CPU, "test")
        results[f"calls of {name}"] = [(event.op, event.numel) for event in axis.ledger.posted]
    axis.ledger.reset()
    results["announced"] = announce(axis, f"from {rank}", CPU, "test")
    results["calls of announced"] = [(event.op, event.numel) for event in axis.ledger.posted]
    return results


def test_texts_cost_as_many_bytes_as_the_longest_and_none_where_all_are_empty() -> None:
    for got in run_ranks(every_text, 4):
        assert got["nobody"] == [""] * 4 and got["calls of nobody"] == [("all_reduce", 1)]
        assert got["one"] == ["", "", "größer", ""]
        assert got["calls of one"] == [("all_reduce", 1), ("all_gather", len("größer".encode()))]
        assert got["all"] == ["0", "11", "222", "3333"] and got["calls of all"][1] == ("all_gather", 4)
        assert got["long"] == ["x" * TEXT_BYTES] * 4
        assert got["announced"] == "from 0" and got["calls of announced"] == [("broadcast", TEXT_BYTES)]


def sum_order(rank: int, parts: int) -> list[torch.Tensor]:
    axis = Topology(RankGrid(ParallelSizes(dp=4)), rank, CPU).axis("dp")
    values = torch.randn(64 * 4, generator=torch.Generator().manual_seed(rank))
    pieces = values.view(4, 64).chunk(parts, dim=1)
    return [axis.reduce_scatter(piece.contiguous().flatten(), "test").wait() for piece in pieces]


def test_the_order_of_a_sum_does_not_depend_on_how_buckets_are_cut() -> None:
    whole = [torch.cat(shards) for shards in run_ranks(sum_order, 4, 1)]
    cut = [torch.cat(shards) for shards in run_ranks(sum_order, 4, 8)]
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))


def bf16_scatter(rank: int) -> torch.Tensor:
    axis = Topology(RankGrid(ParallelSizes(tp=4)), rank, CPU).axis("tp")
    return axis.reduce_scatter(torch.full((4,), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16), "test").wait()


def test_bf16_sums_are_rounded_once() -> None:
    # 1 + 3 x 2^-9 rounds to 1 + 2^-7 in bf16; adding one by one in bf16 would stay at 1.
    assert all(float(value) == 1 + 2.0**-7 for value in run_ranks(bf16_scatter, 4))


def two_topologies(rank: int) -> tuple[float, float, bool]:
    one = Topology(RankGrid(ParallelSizes(tp=4)), rank, CPU)
    two = Topology(RankGrid(ParallelSizes(tp=2, dp=2)), rank, CPU, kv_heads=1)
    first = one.axis("tp").all_reduce(torch.tensor([float(rank)]), "a").wait()
    second = two.axis("dp").all_reduce(torch.tensor([float(rank)]), "a").wait()
    one.close()
    third = two.axis("kv_replicas").all_reduce(torch.tensor([float(rank)]), "a").wait()
    ok = one.optional_axis("tp") is None and len(two.ledger.posted) == 2 and float(third) == (1.0 if rank < 2 else 5.0)
    return float(first), float(second), ok


def test_two_topologies_live_in_one_process() -> None:
    assert run_ranks(two_topologies, 4) == [(6.0, 2.0, True), (6.0, 4.0, True), (6.0, 2.0, True), (6.0, 4.0, True)]


def missing_axis(rank: int) -> str:
    topology = Topology(RankGrid(ParallelSizes(pp=4)), rank, CPU)
    assert (topology.optional_axis("ends") is None) == (rank in (1, 2)), "only the end stages hold a tied embedding"
    with pytest.raises(TopologyError) as raised:
        topology.axis("kv_replicas")
    with pytest.raises(TopologyError, match="no axis 'kv_replica' in any layout"):
        topology.optional_axis("kv_replica")
    return str(raised.value)


def test_an_axis_that_is_off_is_named() -> None:
    messages = run_ranks(missing_axis, 4)
    assert "rank 2 (pp 2, dp 0, tp 0) has no axis 'kv_replicas'; it has world, tp, cp, dp, pp" in messages[2]


def wrong_world(rank: int) -> str:
    with pytest.raises(TopologyError) as raised:
        Topology(RankGrid(ParallelSizes(tp=4)), rank, CPU)
    return str(raised.value)


def test_a_world_of_another_size_is_refused() -> None:
    assert all("2 ranks were started, but tp=4" in message for message in run_ranks(wrong_world, 2))


def pipeline_groups(rank: int) -> bool:
    topology = Topology(RankGrid(ParallelSizes(pp=2)), rank, CPU)
    return topology.axis("pp_forward")._backend.group is not topology.axis("pp_backward")._backend.group


def test_the_two_directions_of_a_pipeline_have_groups_of_their_own() -> None:
    assert all(run_ranks(pipeline_groups, 2))


def calls_at_start(rank: int, size: int) -> tuple[list[str], list[str]]:
    """List torch's calls while a pipeline's topology is made, and those of the first use of its `pp` group."""
    with CountCalls() as at_start:
        topology = Topology(RankGrid(ParallelSizes(pp=size)), rank, CPU)
    with CountCalls() as at_first_use:
        topology.axis("pp").connect(CPU)
    return at_start.names, at_first_use.names


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_connection_of_a_step_is_opened_at_start(size: int) -> None:
    """On both pipeline groups a group call with both ring neighbours, each way; `pp` is left to its first user."""
    for rank, (at_start, at_first_use) in enumerate(run_ranks(calls_at_start, size, size)):
        # Reductions of one element: world, the two directions, and the tied ends. `dp` and `tp` are of one rank here.
        num_reductions = 4 if rank in (0, size - 1) else 3
        assert sorted(at_start) == ["allreduce_"] * num_reductions + ["recv_"] * 4 + ["send"] * 4
        assert at_first_use == ["allreduce_"]


def timeouts_of_groups(rank: int, seconds: int) -> set[float]:
    topology = Topology(RankGrid(ParallelSizes(tp=2, pp=2)), rank, CPU, kv_heads=1, timeout=timedelta(seconds=seconds))
    assert len(topology._groups) >= 5
    return {group._get_backend(CPU).options._timeout.total_seconds() for group in topology._groups.values()}


def test_the_timeout_reaches_every_group() -> None:
    assert run_ranks(timeouts_of_groups, 4, 77) == [{77.0}] * 4


def fails_on_rank_two(rank: int) -> int:
    if rank == 2:
        raise ValueError("planted")
    dist.barrier()
    return rank


def test_the_harness_raises_the_failing_ranks_traceback() -> None:
    with pytest.raises(RankFailedError, match=r"rank 2 failed(.|\n)*planted"):
        run_ranks(fails_on_rank_two, 4)


def hangs_on_rank_one(rank: int) -> int:
    if rank == 1:
        time.sleep(60)
    return rank


def test_the_harness_names_a_rank_that_hangs() -> None:
    with pytest.raises(RankFailedError, match=r"ranks \[1\] did not finish"):
        run_ranks(hangs_on_rank_one, 2, timeout_seconds=3.0)


def reduce_one(rank: int) -> float:
    value = torch.ones(1)
    dist.all_reduce(value)
    return float(value)


@pytest.mark.slow
def test_eight_ranks_start_faster_than_one_interpreter_imports_torch() -> None:
    """Eight ranks take 0.2 to 0.5 s on an idle machine. As a ratio, since machines are shared: less than one import."""
    run_ranks(reduce_one, 8)  # starts the fork server, once per test session
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    import_seconds = time.perf_counter() - begin
    # The best of three: another process may take the cores for a moment, and a slow start would be slow each time.
    start_seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        assert run_ranks(reduce_one, 8) == [8.0] * 8
        start_seconds.append(time.perf_counter() - begin)
    assert min(start_seconds) < import_seconds
