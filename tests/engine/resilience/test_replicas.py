"""Replicas that differ by one bit are named; replicas that are alike never are; a comparison costs what it says."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.engine.resilience.runs import Trace, config_of, engine_of, open_batches, run
from tests.harness import run_ranks
from tests.parity.cases import Case
from triaxis.engine.checkpoint.history import RunHistory
from triaxis.engine.comm.ledger import Event
from triaxis.engine.optimizer.bucket import Bucket
from triaxis.engine.resilience.replicas import PURPOSE, ReplicaCheck
from triaxis.engine.step import Engine

pytestmark = pytest.mark.distributed

EVERYTHING = Case("mqa_rope_bias", tp=2, pp=2, dp=2, sequence_parallel=True, dtype="bf16")
"""Replicas over all four axes: kv heads < tp, tied ends, norms, dp."""


def flip(weight: torch.Tensor) -> None:
    """The lowest bit of the second element."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    weight.detach().view(-1)[1:2].view(bits).bitwise_xor_(1)


class FlipsOneBit:
    """Changes one weight on one rank before the update of a step (from 0)."""

    def __init__(self, rank: int, name: str, at_step: int) -> None:
        self.rank, self.name, self.at_step = rank, name, at_step

    def __call__(self, engine: Engine, step: int) -> None:
        if step == self.at_step and engine.topology.rank == self.rank:
            flip(engine.parameters[self.name].value)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        (
            Case("gpt", dp=4, dtype="bf16"),
            FlipsOneBit(2, "layers.3.mlp.up.weight", 3),
            ["rank 2 holds a different layers.3.mlp.up.weight than ranks 0, 1, 3 (dp replicas)"],
        ),
        (
            Case("gpt", dp=6, dp_replicas=2, global_batch_size=6, dtype="bf16"),
            FlipsOneBit(2, "layers.3.mlp.up.weight", 3),
            [
                "rank 2 holds a different layers.3.mlp.up.weight than ranks 0, 1 (dp_shard replicas)",
                "ranks 2, 5 (dp_replicas replicas) differ in layers.3.mlp.up.weight, and no majority shows which one is wrong",
            ],
        ),
        (
            Case("llama", tp=2),
            FlipsOneBit(1, "layers.1.mlp.norm.weight", 3),
            ["ranks 0, 1 (tp replicas) differ in layers.1.mlp.norm.weight, and no majority shows which one is wrong"],
        ),
    ],
    ids=["a copy on dp4", "a copy in replicas of the state", "a norm on tp2"],
)
def test_one_flipped_bit_is_named_and_stops_the_run(
    case: Case, change: FlipsOneBit, words: list[str], tmp_path: Path
) -> None:
    checks = {"train": {"steps": 8, "micro_batch_size": 1}, "resilience": {"replica_check_interval": 2}}
    traces: list[Trace] = run_ranks(run, case.world_size, case, str(tmp_path), checks, None, 0, change)
    for trace in traces:
        assert f"step 4: {words[0]}" in trace.error
        assert "in step 2 they were the same" in trace.error and trace.exit_code == 5
        [(kind, step, message, details)] = trace.events
        assert (kind, step, details["differences"]) == ("replicas_differ", 3, words) and words[0] in message


WRONG = ("embedding.word.weight", "layers.7.attention.kv.weight")


def comparisons(rank: int, case: Case) -> tuple[list[list[str] | None], list[Event]]:
    """What comparisons find in steps after which all is alike, then with each of WRONG changed on the last rank; calls of one."""
    engine = engine_of(rank, config_of(case, {}), case)
    check, found = ReplicaCheck(engine), []
    with closing(open_batches(engine, RunHistory())(0)) as batches:
        for step in range(2):
            losses = engine.forward_backward(batches.next_step())
            before = len(engine.topology.ledger.posted)
            check.post(step)
            calls = engine.topology.ledger.posted[before:]
            engine.update(losses, 1e-2).wait()
            found.append(check.read(step))
    engine.buffers.wait_all()
    for step, name in enumerate(WRONG, start=2):
        for _ in range(2):  # and back
            if rank == case.world_size - 1:
                flip(engine.parameters[name].value)
            check.post(step)
            found.append(check.read(step))
    assert check.read(0) is None, "that comparison has been read"
    return found, calls


def alike(rank: int, case: Case) -> list[str] | None:
    check = ReplicaCheck(engine_of(rank, config_of(case, {}), case))
    check.post(0)
    return check.read(0)


def test_a_stage_without_layers_has_nothing_to_compare() -> None:
    """Its rank takes part in the comparison of the world."""
    case = Case("gpt", pp=3, num_layers=2, layers_per_stage=(1, 0, 1), global_batch_size=3)
    assert run_ranks(alike, 3, case) == [[], [], []]


def test_every_kind_of_replica_is_compared_and_raises_no_alarm_where_all_are_alike() -> None:
    for (first, second, *changed), calls in run_ranks(comparisons, 8, EVERYTHING):
        assert first == second == []
        for name, sentences, after in zip(WRONG, changed[::2], changed[1::2], strict=True):
            assert after == []
            assert sentences and all("7" in sentence and name in sentence for sentence in sentences)
            axes = {sentence.partition("(")[2].partition(" ")[0] for sentence in sentences}
            assert axes == {"dp", "ends" if name.startswith("embedding") else "kv_replicas"}

        # Two words a weight and axis, and one over the world.
        assert all(call.purpose == PURPOSE for call in calls)
        by_axis = {call.axis: call for call in calls}
        assert len(by_axis) == len(calls) and {call.op for call in calls} == {"all_reduce"}
        assert set(by_axis) == {"dp", "tp", "kv_replicas", "ends", "world"}
        assert by_axis["world"].numel == 1 and by_axis["ends"].numel == 2
        assert by_axis["dp"].numel > by_axis["tp"].numel > by_axis["kv_replicas"].numel > 2
        assert sum(call.numel for call in calls) * 8 < 2_000, "bytes"


def gathers_wrong_bits(rank: int, case: Case) -> list[str] | None:
    """On rank 2, one bit of every gathered bucket is not the owner's."""
    wait = Bucket.wait_for_gather

    def wrong(self: Bucket) -> None:
        is_in_flight = self.gathering is not None
        wait(self)
        if is_in_flight and rank == 2:
            flip(self.weights)

    with pytest.MonkeyPatch.context() as patch:
        check = ReplicaCheck(engine_of(rank, config_of(case, {}), case))
        patch.setattr(Bucket, "wait_for_gather", wrong)
        check.post(0)
        return check.read(0)


def test_a_rank_that_gathers_other_bits_than_the_owner_holds_is_named() -> None:
    case = Case("gpt", dp=3, zero=3, num_layers=2, global_batch_size=3)
    for found in run_ranks(gathers_wrong_bits, 3, case):
        assert found is not None and len(found) == 1
        assert found[0].startswith("rank 2 holds a different layers.0.") and found[0].endswith(
            "ranks 0, 1 (dp replicas)"
        )
