"""The bytes that formulas promise are the bytes that a link carries.

Ranks stand on hosts of their own (tests/netns.py). Each verb of an `Axis` runs between two readings of what every host
has sent; the ledger's lines, priced by the ring costs of models/predict/traffic.py, must give the same number. Ring costs are
what ideal algorithms send. gloo's all-reduce and all-gather are rings, and the reduce-scatter of engine/comm/backends.py
is an exchange of chunks: all three send just that, which is shown here and not assumed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from tests import netns
from tests.harness import run_ranks
from tests.lacking import STRICT, VARIABLE
from triaxis.engine.comm.backends import Message
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import Event
from triaxis.engine.comm.topology import Topology
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.models.predict.layer_calls import wire_bytes

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")

MESSAGE_BYTES = 4 * 2**20
PLANTED_BYTES = 2**20
NUM_ROUNDS = 3
TOLERANCE_BYTES = 4 * 2**10
"""0.1 % of the message. gloo opens each of its messages with 48 bytes, 36 times in an all-reduce over 4 ranks: 1,728 bytes,
the largest excess seen. What TCP adds now and then (selective acknowledgements) has the rest."""


def all_reduce(axis: Axis) -> None:
    axis.all_reduce(torch.ones(MESSAGE_BYTES // 4), "test").wait()


def reduce_scatter(axis: Axis) -> None:
    axis.reduce_scatter(torch.ones(MESSAGE_BYTES // 4), "test").wait()


def all_gather(axis: Axis) -> None:
    axis.all_gather(torch.ones(MESSAGE_BYTES // 2 // axis.size, dtype=torch.bfloat16), "test").wait()


def all_to_all(axis: Axis) -> None:
    axis.all_to_all(torch.ones(axis.size, MESSAGE_BYTES // 4 // axis.size), "test").wait()


def hand_over(axis: Axis) -> None:
    """As in a pipeline: every member but the last sends to the next one."""
    messages = []
    if axis.index > 0:
        messages.append(Message("recv", torch.empty(MESSAGE_BYTES // 2, dtype=torch.bfloat16), axis.index - 1))
    if axis.index < axis.size - 1:
        messages.append(Message("send", torch.ones(MESSAGE_BYTES // 2, dtype=torch.bfloat16), axis.index + 1))
    for pending in axis.exchange(messages, "test"):
        pending.wait()


def planted_all_reduce(axis: Axis) -> None:
    all_reduce(axis)
    dist.all_reduce(torch.ones(PLANTED_BYTES // 4), group=axis._backend.group)


def gloos_own_reduce_scatter(axis: Axis) -> None:
    axis._backend.kind = "other"
    reduce_scatter(axis)
    axis._backend.kind = "gloo"


Verb = Callable[[Axis], None]
VERBS: tuple[Verb, ...] = (all_reduce, reduce_scatter, all_gather, all_to_all, hand_over)


@dataclass(frozen=True, slots=True)
class Measured:
    """One verb as one rank saw it: its lines of the ledger, and what its host sent per interface, round by round."""

    posted: list[Event]
    sent: dict[str, list[int]]

    def recorded_bytes(self) -> int:
        """What the ledger's lines cost on a wire."""
        total = 0
        for event in self.posted:
            assert event.dtype is not None
            total += wire_bytes(event.op, event.group_size, event.numel * event.dtype.itemsize)
        return total


def measure(
    rank: int, hosts: Sequence[str], grid: RankGrid, axis_name: str, verbs: Sequence[Verb]
) -> dict[str, Measured]:
    """Run on a rank. The barriers belong to the default group, which has stayed outside: no host counts their bytes."""
    netns.enter(hosts[grid.node(rank)])
    topology = Topology(grid, rank, CPU)
    axis = topology.axis(axis_name)
    measured = {}
    for verb in verbs:
        sent: dict[str, list[int]] = {netns.LINK: [], netns.INSIDE: []}
        for _ in range(NUM_ROUNDS):
            topology.ledger.reset()
            dist.barrier()
            before = {interface: netns.sent_bytes(interface) for interface in sent}
            dist.barrier()
            verb(axis)
            dist.barrier()
            for interface, rounds in sent.items():
                rounds.append(netns.sent_bytes(interface) - before[interface])
        measured[verb.__name__] = Measured(topology.ledger.posted, sent)
    return measured


def check(measured: Sequence[dict[str, Measured]], grid: RankGrid, carrier: str, unrecorded_bytes: int = 0) -> None:
    """On every host `carrier` took what the host's ranks recorded (and what they did not), the other interface nothing.

    A segment that TCP sent again would be counted again (tests/netns.py makes that rare): the smallest round counts.
    """
    for host in range(grid.num_nodes):
        ranks = [rank for rank in range(grid.world_size) if grid.node(rank) == host]
        for verb in measured[ranks[0]]:
            recorded = sum(measured[rank][verb].recorded_bytes() for rank in ranks)
            for interface, rounds in measured[ranks[0]][verb].sent.items():
                expected = recorded + unrecorded_bytes if interface == carrier else 0
                assert abs(min(rounds) - expected) <= TOLERANCE_BYTES, (
                    f"{verb}: {interface} of host {host} carried {rounds} bytes in {NUM_ROUNDS} rounds, expected {expected}"
                )


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with netns.hosts(4) as names:
        yield names


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_with_a_rank_per_host_every_byte_crosses_the_link(hosts: list[str], num_hosts: int) -> None:
    grid = RankGrid(ParallelSizes(dp=num_hosts), ranks_per_node=1)
    measured = run_ranks(measure, num_hosts, hosts, grid, "dp", VERBS)
    check(measured, grid, netns.LINK)
    # The same by hand, so that no verb may turn into another one with a matching line in the ledger.
    part = MESSAGE_BYTES * (num_hosts - 1) // num_hosts
    by_hand = {"all_reduce": 2 * part, "hand_over": MESSAGE_BYTES}
    by_hand |= dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), part)
    assert {verb: one.recorded_bytes() for verb, one in measured[0].items()} == by_hand
    assert measured[-1]["hand_over"].recorded_bytes() == 0


def test_data_parallel_peers_on_two_hosts_add_up_on_the_link(hosts: list[str]) -> None:
    grid = RankGrid(ParallelSizes(tp=2, dp=2), ranks_per_node=2)
    check(run_ranks(measure, 4, hosts, grid, "dp", VERBS), grid, netns.LINK)


def test_tensor_parallel_traffic_never_leaves_its_host(hosts: list[str]) -> None:
    grid = RankGrid(ParallelSizes(tp=2, dp=2), ranks_per_node=2)
    check(run_ranks(measure, 4, hosts, grid, "tp", VERBS), grid, netns.INSIDE)


@pytest.mark.parametrize(
    ("verb", "unrecorded_bytes"),
    [
        pytest.param(planted_all_reduce, wire_bytes("all_reduce", 2, PLANTED_BYTES), id="planted all-reduce"),
        # It is an all-reduce inside, which is why the engine does not use it: twice the bytes of the ledger's line.
        pytest.param(
            gloos_own_reduce_scatter, wire_bytes("reduce_scatter", 2, MESSAGE_BYTES), id="gloo's own reduce-scatter"
        ),
    ],
)
def test_what_nobody_recorded_shows_on_the_link(hosts: list[str], verb: Verb, unrecorded_bytes: int) -> None:
    grid = RankGrid(ParallelSizes(dp=2), ranks_per_node=1)
    measured = run_ranks(measure, 2, hosts, grid, "dp", [verb])
    with pytest.raises(AssertionError, match="eth0 of host 0 carried"):
        check(measured, grid, netns.LINK)
    check(measured, grid, netns.LINK, unrecorded_bytes)


def test_hosts_are_removed_when_a_test_fails() -> None:
    with pytest.raises(RuntimeError, match="planted"), netns.hosts(2) as names:
        assert all(netns.exists(name) for name in names)
        raise RuntimeError("planted")
    assert not any(netns.exists(name) for name in names)


@pytest.mark.parametrize(("strict", "outcome"), [(STRICT, pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_machine_that_cannot_count_skips_and_fails_in_our_ci(
    monkeypatch: pytest.MonkeyPatch, strict: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", "true")  # as services set it; not enough to fail
    monkeypatch.setenv(VARIABLE, strict)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(outcome, match="iproute2"), netns.hosts(2):
        raise AssertionError("hosts without the command that makes them")
