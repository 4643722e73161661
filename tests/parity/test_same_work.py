"""Microbatches of a step ask for the same work, so that a CUDA graph of one would serve the others; what differs is named.

The first microbatch's gradients replace the main grads, and the last one's post their reductions: they are not compared.
"""

import pytest

from tests.harness import run_ranks
from tests.parity.cases import Case, build_rank
from tests.parity.same_work import differences, recorded
from tests.parity.test_parity import SELECTIVE

pytestmark = pytest.mark.distributed

FEW = {"num_layers": 2, "global_batch_size": 4}

SAME = [
    Case("gpt", **FEW),
    Case("llama", tp=2, sequence_parallel=True, recompute=("full", "uniform", 1), **FEW),
    Case("mqa_rope_bias", tp=2, recompute=SELECTIVE, modules=("mlp", "attention"), head_tokens=3, **FEW),
    Case("qwen", pp=2, **FEW),
    Case("gpt", pp=2, vpp=2, schedule="zbv", num_layers=4, global_batch_size=4),
    Case("llama", cp=2, **FEW),
    Case("gemma2", **FEW),
    Case("gpt_dropout", **FEW),
    Case("llama", dtype="bf16", fp8="tensorwise", **FEW),
]

OTHER = {
    # A row's documents have other lengths, which kernels of the CPU read.
    Case("qwen", documents=True, **FEW): "aten.slice.Tensor",
    # The host reads how many rows each expert has.
    Case("deepseek", dp=2, ep=2, num_layers=2, global_batch_size=8): "aten.slice.Tensor",
    # A bucket's weights are in another slot.
    Case("llama", dp=2, zero=3, num_layers=2, global_batch_size=8): "aten.view.default",
}
"""What else a graph would need: the first operator in which two microbatches differ."""


def compared(rank: int, case: Case, one: int, other: int) -> tuple[int, list[str]]:
    """Return how many operators a rank's step has, and what is different in two microbatches."""
    engine, batches = build_rank(rank, case)
    engine.train_step(batches.next_step(), 1e-3)
    microbatches = batches.next_step()
    with recorded(microbatches) as work:
        engine.forward_backward(microbatches, observers=[work.observe])
    batches.close()
    return sum(map(len, work.calls.values())), differences(work, one, other)


@pytest.mark.parametrize("case", SAME, ids=str)
def test_a_microbatch_asks_for_what_the_one_before_did(case: Case) -> None:
    for num_operators, found in run_ranks(compared, case.world_size, case, 1, 2):
        assert num_operators > 200 and not found


@pytest.mark.parametrize("case", OTHER, ids=str)
def test_what_a_graph_could_not_replay_is_named(case: Case) -> None:
    named = [found[0] for _, found in run_ranks(compared, case.world_size, case, 1, 2) if found]
    assert named and all(f"operators: {OTHER[case]}[" in first for first in named), named


def test_the_first_microbatch_replaces_main_grads() -> None:
    ((_, found),) = run_ranks(compared, 1, SAME[0], 1, 0)
    (backward,) = found
    assert backward.startswith("B of chunk 0") and backward.count("['beta', 0]") == 1
