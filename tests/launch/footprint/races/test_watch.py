"""No races in the covering layouts; each race that is planted is found, and both of its operators are named with their streams."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.cases import Case
from tests.parity.test_parity import COVERING, COVERING_TOO
from triaxis.engine.activations.offload import HostMemory
from triaxis.engine.checkpoint.writer import RankWriter
from triaxis.engine.comm.backends import Message, Pending
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.staging import Staging
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.device.copy_lane import SideStream
from triaxis.engine.device.host_copy import FromCuda, HostCopy
from triaxis.engine.device.pinned_memory import PinnedPool
from triaxis.engine.errors import TopologyError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.engine.optimizer.bucket import Bucket, ReplicaSums, Slot
from triaxis.engine.pipeline.p2p import Transport
from triaxis.launch.footprint.races.check import CheckedRank, check_rank, representative_ranks
from triaxis.launch.footprint.races.report import Race
from triaxis.launch.footprint.run import Footprints
from triaxis.models.gpt.chunk import build_chunks

pytestmark = pytest.mark.distributed

ALL_AXES = Case("qwen", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, num_layers=4, global_batch_size=4)
OFFLOADED = Case("llama", num_layers=2, global_batch_size=2, offload=2)
IN_CI = [
    (ALL_AXES, {"world", "tp", "dp", "pp", "pp_forward", "pp_backward"}),
    (
        Case(
            "mqa_rope_bias",
            tp=2,
            pp=2,
            recompute=("full", "uniform", 1),
            head_tokens=5,
            num_layers=2,
            global_batch_size=2,
        ),
        {"world", "tp", "pp", "pp_forward", "pp_backward"},
    ),
    (
        Case(
            "gpt_dropout",
            tp=2,
            dp=2,
            recompute=("selective", "uniform", 1),
            modules=("norm", "activation", "mlp"),
            offload=1,
            dtype="bf16",
            narrow=True,
            num_layers=2,
            global_batch_size=4,
        ),
        {"world", "tp", "dp", "offload"},
    ),
    (
        Case("gpt", cp=2, tp=2, dp=2, sequence_parallel=True, documents=True, num_layers=2, global_batch_size=2),
        {"world", "tp", "cp", "dp"},
    ),
    # The dp axis is all ranks, whose group is that of the world.
    (Case("gpt", cp=4, dp=2, cp_method="ulysses", num_layers=2, global_batch_size=2), {"world", "cp"}),
    (Case("llama", tp=2, dp=2, zero=2, num_layers=3, global_batch_size=4), {"world", "tp", "dp"}),
    (Case("llama", tp=2, dp=4, zero=3, num_layers=4, global_batch_size=8), {"world", "tp", "dp"}),
    (
        Case("llama", tp=2, dp=4, dp_replicas=2, zero=2, num_layers=3, global_batch_size=8, offload_state=True),
        {"world", "tp", "dp_shard", "dp_replicas", "optimizer's"},
    ),
    (Case("gpt", pp=2, staged=True, num_layers=2, global_batch_size=2), {"world", "pp_forward", "pp_backward"}),
]
"""Layouts, and the streams beside the computation's that their last rank uses."""

NARROW = [
    Case("gpt", tp=2, pp=2, dp=2, sequence_parallel=True, dtype="bf16", num_layers=4),
    Case("llama", pp=2, vpp=2, dp=2, dtype="bf16", narrow=True, bf16_gradients=True, num_layers=4),
    Case("qwen", tp=2, dp=2, dtype="fp32", num_layers=2),
    Case("qwen", tp=2, pp=2, dp=2, zero=2, schedule="zb_h1", dtype="bf16", num_layers=4, global_batch_size=8),
    Case("qwen", tp=2, pp=2, vpp=2, dp=2, zero=3, dtype="bf16", num_layers=8, global_batch_size=8),
    Case("moe", dp=4, dp_replicas=2, ep=2, zero=3, dispatch="all_to_all", global_batch_size=8),
    Case("llama", tp=2, dp=2, dtype="bf16", narrow=True, recompute=("full", "block", 1), offload=2, num_layers=4),
    Case("moe", tp=2, dp=2, ep=2, sequence_parallel=True, offload=1, dispatch="all_to_all", global_batch_size=4),
    Case("moe", tp=2, pp=2, dp=2, ep=2, etp=2, recompute=("full", "block", 1), global_batch_size=4),
    Case("llama", tp=2, cp=2, dp=2, sequence_parallel=True, dtype="bf16", num_layers=2, fp8="tensorwise"),
    Case("qwen", tp=2, pp=2, dp=2, schedule="zb_h1", num_layers=4, global_batch_size=6, fp8="tensorwise"),
    Case("qwen", tp=2, pp=2, sequence_parallel=True, schedule="zb_h1", num_layers=4, fp8="tensorwise", fp8_gather=True),
]


def check(case: Case, rank: int = 0) -> CheckedRank:
    config = case.config()
    if case.staged:
        config = with_value(config, "runtime.collectives", "gloo")
    return check_rank(config, rank, build_chunks)


def ranks_of(case: Case) -> list[int]:
    return representative_ranks(RankGrid(parallel_sizes(case.config())))


def shown(races: Sequence[Race]) -> str:
    return "\n".join(map(str, races))


@pytest.mark.parametrize(("case", "streams"), IN_CI, ids=[str(case) for case, _ in IN_CI])
def test_no_races(case: Case, streams: set[str]) -> None:
    rank = ranks_of(case)[-1]
    found = check(case, rank)
    assert not found.races, shown(found.races)
    assert {stream.removeprefix("the ").split(" ")[0] for stream in found.streams[1:]} == streams
    # More runs than is sent, in two training steps and a validation.
    assert found.num_operators > 3 * len(Footprints(case.config(), build_chunks, full=True).of(rank).events)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*COVERING, *COVERING_TOO, *NARROW], ids=str)
def test_no_races_in_covering_layouts(case: Case) -> None:
    for rank in ranks_of(case):
        found = check(case, rank)
        assert not found.races, f"rank {rank}\n{shown(found.races)}"


def test_ranks_that_stand_for_all() -> None:
    def of(**sizes: int) -> list[int]:
        return representative_ranks(RankGrid(ParallelSizes(**sizes), 8))

    assert of() == [0]
    assert of(dp=4) == of(cp=2, dp=2) == [0, 3]
    assert of(tp=2, pp=4, dp=2) == [0, 3, 8, 11, 12, 15]


def test_a_rank_that_does_not_exist() -> None:
    with pytest.raises(TopologyError, match="2 ranks, counted from 0"):
        check(Case("gpt", dp=2), 2)


Flow = tuple[str, str, str]
"""Operation, axis and purpose of calls."""

IMPORTANT_FLOWS: list[Flow] = [
    ("all_gather", "dp", "parameters"),
    ("reduce_scatter", "dp", "gradients"),
    ("all_gather", "tp", "layers.0.attention.qkv regather"),
    ("reduce_scatter", "tp", "layers.0.mlp.down forward"),
    ("recv", "pp_backward", "activation gradients"),
    ("send", "pp_forward", "activations"),
    ("all_reduce", "ends", "replica gradients"),
    ("all_reduce", "world", "step"),
]


def without_waits(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody wait for these calls; sends are let go of at once."""
    wait, completed = Pending.wait, Pending.__dict__["completed"].fget

    def is_of_flow(pending: Pending) -> bool:
        if pending._written is None:
            return False
        event = pending._written[1]
        return (event.op, event.axis, event.purpose) == flow

    def plain_result(self: Pending) -> torch.Tensor:
        if is_of_flow(self):
            self._work = ()
        return wait(self)

    monkeypatch.setattr(Pending, "wait", plain_result)
    monkeypatch.setattr(Pending, "completed", property(lambda self: is_of_flow(self) or completed(self)))


def assert_found(races: Sequence[Race], flow: Flow) -> None:
    op, axis, purpose = flow
    kinds = {"early free"} if op == "send" else {"unordered read", "unordered overwrite", "unordered writes"}
    planted = []
    for race in races:
        # A group call is named by all of its messages, such as `send + recv (pp_forward, activations)`.
        ops, _, what = race.first.name.partition(" (")
        if race.kind in kinds and op.replace("_", "-") in ops.split(" + ") and what == f"{axis}, {purpose})":
            planted.append(race)
    assert planted, f"{flow} in\n{shown(races)}"
    for race in planted:
        assert race.first.stream.name.endswith("communicator's stream") and race.second.stream is not race.first.stream
        assert str(race.first) in str(race) and str(race.second) in str(race)


@pytest.mark.parametrize("flow", IMPORTANT_FLOWS, ids=" ".join)
def test_a_wait_that_is_missing_is_found(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    without_waits(flow, monkeypatch)
    assert_found(check(ALL_AXES).races, flow)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ALL_AXES,
        Case("mqa_rope_bias", tp=4, pp=2, num_layers=2, global_batch_size=2, head_tokens=5),
        Case("llama", tp=2, pp=2, recompute=("full", "uniform", 1), num_layers=4, global_batch_size=2),
    ],
    ids=str,
)
def test_every_wait_is_needed(case: Case) -> None:
    """Each kind of call of the first and of the last rank in turn is never waited for."""
    for rank in (0, case.world_size - 1):
        events = Footprints(case.config(), build_chunks, full=True).of(rank).events
        for flow in sorted({(event.op, event.axis, event.purpose) for event in events}):
            with pytest.MonkeyPatch.context() as monkeypatch:
                without_waits(flow, monkeypatch)
                assert_found(check(case, rank).races, flow)


def one_receive_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Axis.exchange
    buffers: dict[str, torch.Tensor] = {}

    def reusing(self: Axis, messages: Sequence[Message], purpose: str) -> list[Pending]:
        own = [
            replace(each, tensor=buffers.setdefault(self.name, each.tensor)) if each.kind == "recv" else each
            for each in messages
        ]
        return exchange(self, own, purpose)

    monkeypatch.setattr(Axis, "exchange", reusing)


def write_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Axis.exchange

    def writing(self: Axis, messages: Sequence[Message], purpose: str) -> list[Pending]:
        posted = exchange(self, messages, purpose)
        for each in messages:
            if each.kind == "send":
                each.tensor.detach().zero_()
        return posted

    monkeypatch.setattr(Axis, "exchange", writing)


def let_go_of_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    post = Transport.post

    def forgetting(self: Transport, each: Any) -> None:
        post(self, each)
        self._sent.clear()

    monkeypatch.setattr(Transport, "post", forgetting)


def let_go_of_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: HostMemory, moved: Sequence[Any], mark: Any) -> None:
        for each in moved:
            each.tensor = None

    monkeypatch.setattr(HostMemory, "let_go", at_once)


def use_before_it_has_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "arrived", lambda self, mark: None)


def copy_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def post(self: SideStream, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        with self.cuda.stream(self.stream):
            for destination, source in copies:
                destination.copy_(source)
            mark = self.cuda.Event()
            mark.record()
        return mark

    monkeypatch.setattr(SideStream, "post", post)


def one_host_buffer_for_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    take, post = PinnedPool.take, SideStream.post
    buffers: dict[Any, torch.Tensor] = {}
    streams: list[Any] = []

    def same_buffer(self: PinnedPool, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if (numel, dtype) not in buffers:
            buffers[numel, dtype] = take(self, numel, dtype)
        return buffers[numel, dtype]

    def in_turn(self: SideStream, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        streams[:] = streams or [self.stream, self.cuda.Stream(self.device)]
        streams.reverse()
        self.stream = streams[0]
        return post(self, copies)

    monkeypatch.setattr(PinnedPool, "take", same_buffer)
    monkeypatch.setattr(SideStream, "post", in_turn)


def call_before_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copying = Staging._copying

    def at_once(self: Staging, copies: Any) -> Callable[[], None]:
        copying(self, copies)
        return lambda: None

    monkeypatch.setattr(Staging, "_copying", at_once)


def stage_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triaxis.launch.footprint.races.streams._WatchedStream.wait_stream", lambda self, other: None)


def reuse_host_memory_without_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Staging, "_event", lambda self: None)


def read_numbers_before_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopy, "arrived", lambda self: self._values)


def write_a_checkpoint_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    save = RankWriter.save

    def at_once(self: RankWriter, folder: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(FromCuda, "finish", lambda self, mark: None)
            return save(self, folder)

    monkeypatch.setattr(RankWriter, "save", at_once)


def reuse_a_slot_before_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: Slot) -> None:
        self.sending = None

    monkeypatch.setattr(Slot, "free", at_once)


def use_a_layer_before_its_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Bucket.wait_for_gather

    def at_once(self: Bucket) -> None:
        if self.weight_slots is None:
            wait(self)

    monkeypatch.setattr(Bucket, "wait_for_gather", at_once)


def sum_over_replicas_before_the_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self: ReplicaSums, bucket: Bucket | None) -> None:
        if bucket is not None:
            self._summing.append(self._axis.all_reduce(bucket.owned_grads, "replica gradients"))

    monkeypatch.setattr(ReplicaSums, "sent", at_once)


def _without_waits_for(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = SideStream.wait

    def of_others(self: SideStream, mark: Any) -> None:
        if stream not in self.stream.of.name:
            wait(self, mark)

    monkeypatch.setattr(SideStream, "wait", of_others)


def reuse_a_place_before_its_state_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_waits_for("optimizer's stream to the host", monkeypatch)


def update_state_before_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_waits_for("optimizer's stream to the device", monkeypatch)


PIPELINE = Case("gpt", pp=2, num_layers=2, global_batch_size=4)
PIPELINE_STAGED = replace(PIPELINE, staged=True)
ZERO_2 = Case("llama", dp=2, zero=2, num_layers=3, global_batch_size=4)
ZERO_3 = replace(ZERO_2, zero=3)
AWAY = Case("llama", dp=2, num_layers=2, dtype="bf16", bucket_bytes=700, global_batch_size=2, offload_state=True)
HSDP = Case("llama", dp=4, dp_replicas=2, num_layers=2, global_batch_size=4)
PLANTED = [
    (use_a_layer_before_its_gather, ZERO_3, 0, "unordered read", "all-gather (dp", "aten::", ""),
    (reuse_a_slot_before_its_sum, ZERO_2, 0, "unordered overwrite", "reduce-scatter (dp", "aten::", ""),
    (
        sum_over_replicas_before_the_reduction,
        HSDP,
        0,
        "unordered read",
        "reduce-scatter (dp_shard",
        "all-reduce (dp_replicas",
        "",
    ),
    (
        reuse_a_place_before_its_state_has_left,
        AWAY,
        0,
        "unordered overwrite",
        "aten::copy_",
        "aten::copy_",
        "the optimizer's",
    ),
    (update_state_before_it_has_come, AWAY, 0, "unordered writes", "aten::copy_", "aten::", "the optimizer's"),
    (one_receive_buffer, PIPELINE, 1, "unordered read", "recv (pp_forward", "aten::", ""),
    (write_what_is_sent, PIPELINE, 0, "unordered overwrite", "send (pp_forward", "aten::zero_", ""),
    (let_go_of_what_is_sent, PIPELINE, 0, "early free", "send (pp_forward", "free", ""),
    (let_go_of_what_is_copied, OFFLOADED, 0, "early free", "aten::copy_", "free", "the offload stream"),
    (use_before_it_has_come_back, OFFLOADED, 0, "unordered read", "aten::copy_", "aten::addmm_", "the offload stream"),
    (copy_without_an_event, OFFLOADED, 0, "unordered read", "aten::", "aten::copy_", "the computation's stream"),
    (
        one_host_buffer_for_two_streams,
        OFFLOADED,
        0,
        "unordered writes",
        "aten::copy_",
        "aten::copy_",
        "the offload stream",
    ),
    (
        read_numbers_before_they_are_there,
        OFFLOADED,
        0,
        "unordered read",
        "aten::copy_",
        "a read",
        "the computation's stream",
    ),
    (
        write_a_checkpoint_before_it_is_copied,
        OFFLOADED,
        0,
        "unordered read",
        "aten::copy_",
        "a read",
        "the computation's stream",
    ),
    (
        call_before_the_copies,
        PIPELINE_STAGED,
        0,
        "unordered read",
        "aten::copy_",
        "c10d::send",
        "the pp_forward staging",
    ),
    (
        reuse_host_memory_without_an_event,
        PIPELINE_STAGED,
        1,
        "unordered overwrite",
        "aten::copy_",
        "c10d::recv",
        "the computation's",
    ),
    (stage_without_an_event, PIPELINE_STAGED, 0, "unordered read", "aten::", "aten::copy_", "the computation's stream"),
]


@pytest.mark.parametrize(
    ("plant", "case", "rank", "kind", "first", "second", "stream"), PLANTED, ids=[each[0].__name__ for each in PLANTED]
)
def test_a_planted_race_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    case: Case,
    rank: int,
    kind: str,
    first: str,
    second: str,
    stream: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    races = check(case, rank).races
    planted = [
        race
        for race in races
        if race.kind == kind
        and race.first.name.startswith(first)
        and race.second.name.startswith(second)
        and race.first.stream.name.startswith(stream)
    ]
    assert planted, shown(races)
