"""The executor runs whatever list it is given: deferred weight gradients, too, in an order of no schedule of ours."""

from dataclasses import replace

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case, Piece, assemble, owned_pieces, weights_of
from tests.parity.test_step_properties import build_rank, weight_grads_marked
from triaxis.engine.pipeline.actions import Action, Kind, Schedule
from triaxis.engine.pipeline.lowering import Instruction
from triaxis.engine.pipeline.programs import Programs

pytestmark = pytest.mark.distributed


def split_backwards(schedule: Schedule) -> Schedule:
    """Each B becomes an I where it stood and a W two actions later: the shape of a zero-bubble schedule."""
    rows = []
    for row in schedule.actions:
        actions: list[Action] = []
        waiting: list[Action] = []
        for action in row:
            if action.kind is Kind.B:
                actions.append(action._replace(kind=Kind.I))
                waiting.append(action._replace(kind=Kind.W))
            else:
                actions.append(action)
            if len(waiting) > 2:
                actions.append(waiting.pop(0))
        rows.append((*actions, *waiting))
    return replace(schedule, name="split", actions=tuple(rows))


def gradients(rank: int, case: Case, split: bool) -> tuple[list[Piece], list[str]]:
    engine, batches = build_rank(rank, case)
    if split:
        engine.train_programs = Programs(split_backwards(engine.schedule))
    ledger = engine.topology.ledger
    ledger.reset()
    with weight_grads_marked(ledger):
        engine.forward_backward(batches.next_step())
    batches.close()
    assert not any(tensor.requires_grad for buffer in engine.buffers.buffers for tensor in buffer.grads)
    order = [event.purpose for event in ledger.events if event.phase in ("mark", "post")]
    return owned_pieces(engine, "grads"), order


@pytest.mark.parametrize(
    "case",
    [
        Case("gpt", pp=2, num_layers=4, global_batch_size=6),
        Case("qwen", tp=2, pp=2, vpp=2, sequence_parallel=True, num_layers=4, global_batch_size=4),
        Case("llama", pp=2, dp=2, num_layers=2),
    ],
    ids=str,
)
def test_deferred_weight_gradients_are_the_same_gradients(case: Case) -> None:
    shapes = {name: tuple(weight.shape) for name, weight in weights_of(case.model, case.num_layers).items()}
    whole, split = (run_ranks(gradients, case.world_size, case, which) for which in (False, True))
    expected = assemble(shapes, [piece for pieces, _ in whole for piece in pieces], tolerance=1e-12)
    got = assemble(shapes, [piece for pieces, _ in split for piece in pieces], tolerance=1e-12)
    for name, want in expected.items():
        assert torch.allclose(got[name], want, rtol=1e-12, atol=1e-15), name
    # The same GEMMs and calls, the GEMMs later among the calls; and gradients of row-parallel layers are gathered again.
    for (_, before), (_, after) in zip(whole, split, strict=True):
        again = [purpose for purpose in after if purpose.endswith(("proj regather", "down regather"))]
        assert bool(again) == case.sequence_parallel
        assert sorted([*before, *again]) == sorted(after)
        assert before != after


def steps_with_a_retry(rank: int, case: Case) -> list[tuple[int, str]]:
    """(ranks that retried, which form ran) of four steps; the allocator of rank 1 retries in the second."""
    engine, batches = build_rank(rank, case)
    programs = engine.train_programs
    forms = {each.instructions[rank]: each.receives for each in (programs.early, programs.late)}
    assert len(forms) == 2
    found = []
    for step in range(4):
        seen: list[Instruction | None] = []
        engine.executor.observers = (seen.append,)
        if (rank, step) == (1, 1):
            engine.count_retries = lambda: 1
        result = engine.train_step(batches.next_step(), 1e-3)
        found.append((result.flags.retried, forms[tuple(each for each in seen if each is not None)]))
        if result.flags.retried:
            assert engine.receive_late()
    batches.close()
    return found


def test_the_first_step_and_those_after_a_retry_receive_late_on_all_ranks() -> None:
    for found in run_ranks(steps_with_a_retry, 2, Case("gpt", pp=2, num_layers=2, global_batch_size=4)):
        assert found == [(0, "late"), (1, "early"), (0, "late"), (0, "late")]


def left_on_meta(rank: int, case: Case) -> list[str]:
    engine, batches = build_rank(rank, case)
    batches.close()
    modules = [chunk for chunk in engine.chunks if isinstance(chunk, torch.nn.Module)]
    assert len(modules) == case.vpp
    tensors = [item for chunk in modules for item in [*chunk.named_parameters(), *chunk.named_buffers()]]
    assert tensors
    return [name for name, tensor in tensors if tensor.is_meta]


@pytest.mark.parametrize("model", ["gpt", "qwen"])
def test_nothing_is_left_on_the_meta_device(model: str) -> None:
    assert run_ranks(left_on_meta, 2, Case(model, tp=2, vpp=2, num_layers=2)) == [[], []]
