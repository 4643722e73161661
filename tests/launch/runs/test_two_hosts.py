"""Training and `triaxis doctor` on hosts that a counted, shaped link joins (tests/netns.py).

Tensor-parallel peers share a host. What a step sends over a host's link must be the bytes that theory gives for pipeline and
data parallelism (`models/predict/traffic.py`, from the config alone), and what stays inside those of tensor parallelism.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import netns
from tests.harness import run_ranks
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.load import load_config
from triaxis.engine.config.schema.telemetry import TelemetryConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.data.loader import Batches
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.layout.partition import partition
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.telemetry.timing.clocks import HostClock
from triaxis.engine.telemetry.timing.marks import TimeMarks
from triaxis.engine.telemetry.timing.step_times import StepTimes
from triaxis.engine.telemetry.timing.time_split import PARTS, Part, TimeSplit
from triaxis.engine.train import build
from triaxis.launch.doctor.judge import judge
from triaxis.launch.doctor.rank import examine
from triaxis.launch.doctor.records import Examination, Finding, Level
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.predict.traffic import expected_traffic

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")
TINY = Path(__file__).resolve().parents[3] / "configs" / "gpt_tiny.yaml"

RANKS_PER_HOST = 2
INSIDE_AXES = ("tp", "kv_replicas")

SLOW_MEGABITS = 20
"""Far below what gloo sends between hosts of a machine that is busy with other things."""

TOLERANCE = 0.005
HEADER_BYTES = 16 * 2**10
"""Beside 0.5 % of the bytes: gloo opens each of its messages with 48 bytes, and the cross-entropy's and the step's are small."""


def config_of(sizes: ParallelSizes, seq_length: int = 128) -> Config:
    overrides = [f"parallel.{name}={getattr(sizes, name)}" for name in ("tp", "pp", "vpp", "dp")]
    model = [
        "model.hidden_size=128",
        "model.num_layers=4",
        "model.ffn_hidden_size=256",
        f"model.seq_length={seq_length}",
    ]
    train = ["train.global_batch_size=8", "train.micro_batch_size=2", "data.synthetic=true", "precision.dtype=fp32"]
    return load_config(TINY, [*overrides, *model, *train, "parallel.sequence_parallel=true"])


def batches_of(config: Config, topology: Topology) -> Batches:
    return Batches(
        SyntheticDataset(config.train.seed, config.model.vocab_size, config.model.seq_length),
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp=topology.sizes.dp,
        dp_rank=topology.coordinates.dp,
        consumed_samples=0,
        device=CPU,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One training step on one rank: bytes that its host sent meanwhile per interface, by round, and seconds of the last."""

    sent: dict[str, list[int]]
    seconds: float


def train_steps(rank: int, hosts: Sequence[str], sizes: ParallelSizes, num_steps: int) -> Step:
    """Run on a rank. The barriers belong to the default group, which has stayed outside: no host counts their bytes."""
    grid, config = RankGrid(sizes, RANKS_PER_HOST), config_of(sizes)
    netns.enter(hosts[grid.node(rank)])
    topology = Topology(grid, rank, CPU, kv_heads=config.model.kv_heads, has_experts=config.model.has_experts)
    engine = build(resolve_recompute(config, topology.sizes), topology, build_chunks)
    batches = batches_of(config, topology)
    engine.train_step(batches.next_step(), 1e-3)
    sent: dict[str, list[int]] = {netns.LINK: [], netns.INSIDE: []}
    seconds = 0.0
    for _ in range(num_steps):
        step = batches.next_step()
        dist.barrier()
        before = {interface: netns.sent_bytes(interface) for interface in sent}
        dist.barrier()
        began = time.monotonic()
        engine.train_step(step, 1e-3)
        engine.buffers.wait_all()  # gathered parameters belong to this step
        seconds = time.monotonic() - began
        dist.barrier()
        for interface, rounds in sent.items():
            rounds.append(netns.sent_bytes(interface) - before[interface])
    batches.close()
    return Step(sent, seconds)


def theory(sizes: ParallelSizes, host: int, axis: str | None = None) -> dict[str, int]:
    """Bytes that the ranks of a host send in a step, by interface, from the config alone; of all axes, or of one."""
    grid, config = RankGrid(sizes, RANKS_PER_HOST), config_of(sizes)
    stages = partition(config.model.num_layers, sizes.pp, sizes.vpp)
    total = {netns.LINK: 0, netns.INSIDE: 0}
    ranks = [rank for rank in range(grid.world_size) if grid.node(rank) == host]
    for rank in ranks:
        for flow, volume in expected_traffic(config, sizes, grid.coordinates(rank), stages).items():
            if axis not in (None, flow.axis):
                continue
            # The step's few numbers go round all ranks: only the last rank of a host hands them to another host.
            inside = flow.axis in INSIDE_AXES or (flow.axis == "world" and rank != ranks[-1])
            total[netns.INSIDE if inside else netns.LINK] += volume.wire_bytes
    return total


def check(steps: Sequence[Step], sizes: ParallelSizes) -> None:
    grid = RankGrid(sizes, RANKS_PER_HOST)
    for host in range(grid.num_nodes):
        for interface, expected in theory(sizes, host).items():
            rounds = steps[host * RANKS_PER_HOST].sent[interface]
            # TCP counts a segment again that it sends again: the smallest round counts.
            assert abs(min(rounds) - expected) <= TOLERANCE * expected + HEADER_BYTES, (
                f"{sizes}: {interface} of host {host} carried {rounds} bytes in a step, theory says {expected}"
            )


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with netns.hosts(4) as names:
        yield names


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(ParallelSizes(tp=2, pp=2), id="a pipeline across two hosts"),
        pytest.param(ParallelSizes(tp=2, dp=2), id="replicas on two hosts"),
        pytest.param(ParallelSizes(tp=2, pp=2, vpp=2, dp=2), id="both, on four hosts", marks=pytest.mark.slow),
    ],
)
def test_the_link_carries_pipeline_and_data_parallel_bytes_and_no_others(
    hosts: list[str], sizes: ParallelSizes
) -> None:
    check(run_ranks(train_steps, sizes.world_size, hosts, sizes, 2), sizes)


@pytest.mark.parametrize("interface", [netns.LINK, netns.INSIDE])
def test_bytes_that_theory_does_not_know_are_found(interface: str) -> None:
    sizes = ParallelSizes(tp=2, dp=2)
    told = [{name: [expected] for name, expected in theory(sizes, rank // 2).items()} for rank in range(4)]
    check([Step(sent, 1.0) for sent in told], sizes)
    told[2][interface][0] += 2**17
    with pytest.raises(AssertionError, match=f"{interface} of host 1 carried"):
        check([Step(sent, 1.0) for sent in told], sizes)


@pytest.mark.slow
def test_a_step_waits_for_a_slow_link(hosts: list[str]) -> None:
    """A link of so many bits per second cannot be faster."""
    sizes, megabits = ParallelSizes(tp=2, dp=2), 50
    try:
        netns.shape(hosts[1], megabits)
        steps = run_ranks(train_steps, sizes.world_size, hosts, sizes, 1)
    finally:
        netns.unshape(hosts[1])
    assert min(step.seconds for step in steps) >= 0.5 * theory(sizes, 1)[netns.LINK] * 8 / (megabits * 1e6)


NUM_SPLIT_STEPS = 4


def split_steps(rank: int, hosts: Sequence[str], sizes: ParallelSizes) -> list[TimeSplit]:
    """Run on a rank: where the time of each step but the first and the last went; rank 0 hears of it."""
    grid, config = RankGrid(sizes, RANKS_PER_HOST), config_of(sizes)
    netns.enter(hosts[grid.node(rank)])
    marks = TimeMarks(HostClock())
    topology = Topology(grid, rank, CPU, kv_heads=config.model.kv_heads, has_experts=config.model.has_experts).observed(
        [marks]
    )
    engine = build(resolve_recompute(config, topology.sizes), topology, build_chunks, observers=[marks.instruction])
    batches = batches_of(config, topology)
    every_step = TelemetryConfig(log_interval=1)
    times = StepTimes(every_step, topology, engine.schedule, marks, num_steps=NUM_SPLIT_STEPS)
    times.begin(0)
    splits = []
    for step in range(1, NUM_SPLIT_STEPS + 1):
        times.enter(StepPart.DATA)
        microbatches = batches.next_step()
        times.enter(StepPart.FORWARD_BACKWARD)
        losses = engine.forward_backward(microbatches)
        times.enter(StepPart.OPTIMIZER)
        engine.update(losses, 1e-3).wait()
        times.end_step()
        split = times.on_step(step)
        splits += [] if split is None else [split]
    times.finish()
    times.close()
    batches.close()
    return splits


def slowed_by_the_link(hosts: list[str], sizes: ParallelSizes, megabits: int) -> tuple[TimeSplit, TimeSplit]:
    """The splits of the quickest step on two hosts, as they are and sending over a link so slow that nothing hides it."""
    found = []
    for slowed in ([], hosts[:2]):
        try:
            for host in slowed:
                netns.shape(host, megabits)
            splits, *_ = run_ranks(split_steps, sizes.world_size, hosts, sizes)
        finally:
            for host in slowed:
                netns.unshape(host)
        found.append(min(splits, key=lambda split: split.step_seconds))
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "megabits", "axis", "part"),
    [
        pytest.param(ParallelSizes(tp=2, dp=2), 8, "dp", "exposed_dp", id="between replicas"),
        # So slow that what a busy machine computes beside it hides little of it.
        pytest.param(ParallelSizes(tp=2, pp=2), 1, "pp_backward", "exposed_pp", id="between stages"),
    ],
)
def test_a_slow_link_is_exposed_time_of_the_axis_that_crosses_it(
    hosts: list[str], sizes: ParallelSizes, megabits: int, axis: str, part: Part
) -> None:
    prompt, slow = slowed_by_the_link(hosts, sizes, megabits)
    on_the_link = theory(sizes, 1, axis)[netns.LINK] * 8 / (megabits * 1e6)
    grown = {each: slow.seconds[each] - prompt.seconds[each] for each in PARTS}
    assert grown[part] >= 0.5 * on_the_link and max(grown.values()) == grown[part], (grown, on_the_link)
    # What a late message costs is neither the schedule's fault nor that of the tensor-parallel peer who got his earlier.
    assert abs(slow.seconds["bubble"] - slow.schedule_bubble) <= 0.2 * grown[part], (slow, grown)
    assert grown["exposed_tp"] <= 0.2 * grown[part], grown


def examined(rank: int, hosts: Sequence[str], sizes: ParallelSizes, folder: Path) -> tuple[Examination, list[Finding]]:
    grid, config = RankGrid(sizes, RANKS_PER_HOST), config_of(sizes, seq_length=32)
    netns.enter(hosts[grid.node(rank)])
    topology = Topology(grid, rank, CPU, kv_heads=config.model.kv_heads, has_experts=config.model.has_experts)
    seen = examine(topology, config, {"runtime.runs_dir": folder}, path_bytes=512 * 2**10)
    return seen, judge(seen)


def failures(findings: Sequence[Finding], check: str) -> list[Finding]:
    return [one for one in findings if one.level is Level.FAIL and one.check == check]


@pytest.mark.slow  # six ranks, and rates that a busy machine bends
def test_the_doctor_names_the_host_behind_the_slow_link(hosts: list[str], tmp_path: Path) -> None:
    three = hosts[:3]
    try:
        netns.shape(three[1], SLOW_MEGABITS)
        results = run_ranks(examined, 6, three, ParallelSizes(tp=2, pp=3), tmp_path)
    finally:
        netns.unshape(three[1])
    (seen, findings) = results[0]
    assert (three[1],) in [one.hosts for one in failures(findings, "links") if f"{three[1]} sends" in one.text]
    assert [one.host for one in seen.facts] == [name for name in three for _ in range(RANKS_PER_HOST)]
    assert all(again == findings for _, again in results)


@pytest.mark.slow
def test_of_two_hosts_the_slow_direction_is_named(hosts: list[str], tmp_path: Path) -> None:
    two = hosts[:2]
    try:
        netns.shape(two[1], SLOW_MEGABITS)
        (_, findings), *_ = run_ranks(examined, 4, two, ParallelSizes(tp=2, dp=2), tmp_path)
    finally:
        netns.unshape(two[1])
    assert any(one.text.startswith(f"{two[1]} -> {two[0]}") for one in failures(findings, "links"))


@pytest.mark.slow
def test_hosts_that_are_alike_are_all_right(hosts: list[str], tmp_path: Path) -> None:
    (seen, findings), *_ = run_ranks(examined, 4, hosts[:2], ParallelSizes(tp=2, dp=2), tmp_path)
    # How fast they are on a machine that does other things too is not for this test to say.
    assert [one for one in findings if one.level is Level.FAIL and one.check not in ("bandwidth", "links")] == []
    assert {one.network.interface for one in seen.facts} == {netns.LINK}
    assert {(one.axis, one.op) for one in seen.groups} >= {("tp", "all_gather"), ("dp", "reduce_scatter")}
    assert len([one for one in seen.groups if one.axis == "dp" and one.op == "reduce_scatter"]) == 2
    clocks = [one.clock for one in seen.facts]
    assert [clock is None for clock in clocks] == [False, True, False, True]
    assert clocks[2] is not None
    assert abs(clocks[2].offset_seconds) <= clocks[2].precision_seconds + 1e-3, "both hosts have one clock"
    assert list(tmp_path.iterdir()) == [], "the test files are gone"
