"""Python's collector between steps: never inside one, and nothing waits for it."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.engine.test_train import Loop, config
from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.run.garbage import GarbageCollection


class Node:
    """Keeps itself alive."""

    def __init__(self) -> None:
        self.me = self


@contextmanager
def collections() -> Iterator[list[int]]:
    """The generations that were collected meanwhile."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)


def test_nothing_is_collected_between_its_steps() -> None:
    assert gc.isenabled()
    with GarbageCollection(3) as garbage, collections() as seen:
        for step in range(1, 8):
            nodes = [Node() for _ in range(5000)]
            assert not gc.isenabled() and len(nodes) == 5000
            garbage.after_step(step)
        assert seen == [2, 2], "after steps 3 and 6"
    assert gc.isenabled()
    with collections() as seen:
        assert [Node() for _ in range(5000)]
    assert seen, "such garbage is collected otherwise"


def test_an_error_gives_it_back() -> None:
    with pytest.raises(RuntimeError), GarbageCollection(1):
        raise RuntimeError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_the_loop_collects_where_the_configuration_says() -> None:
    loop = Loop(config().model_copy(update={"runtime": config().runtime.model_copy(update={"gc_interval": 4})}))
    with collections() as seen:
        loop.run()
    assert seen.count(2) == 1 + 1, "when it begins and after step 4 of 6"


def tensors_in_cycles(rank: int, case: Case) -> int:
    engine, batches = build_rank(rank, case)
    engine.train_step(batches.next_step(), 1e-3)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    for _ in range(2):
        engine.train_step(batches.next_step(), 1e-3)
    gc.collect()
    gc.set_debug(0)
    batches.close()
    return sum(isinstance(each, torch.Tensor) for each in gc.garbage)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt_dropout", recompute=("selective", "uniform", 1), modules=("norm", "activation", "mlp"), offload=3),
        Case("llama", pp=2, recompute=("full", "uniform", 1)),
    ],
    ids=str,
)
def test_a_step_leaves_no_tensor_that_only_the_collector_frees(case: Case) -> None:
    assert run_ranks(tensors_in_cycles, case.world_size, case) == [0] * case.world_size
