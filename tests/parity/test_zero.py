"""ZeRO-2 and 3, where a rank keeps only its own part of main grads, and of weights.

Both equal the oracle, and with one microbatch ZeRO-1 to the bit; gradients of 3 have the bits of 2.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.cases import Case, Piece, RankResult, assemble, owned_pieces, run_case, run_oracle, weights_of
from tests.parity.test_attention_kinds import COVERING as KINDS
from tests.parity.test_experts import COVERING as EXPERTS
from tests.parity.test_latent_attention import COVERING as LATENTS
from tests.parity.test_mtp import COVERING as MTP
from tests.parity.test_parity import CHEAP_WITH_ROPE, COVERING, COVERING_TOO, SELECTIVE, check, compare
from tests.parity.test_step_properties import build_rank
from triaxis.engine.optimizer.bucket import Bucket, Slot, WeightSlots
from triaxis.models.specs import model_specs

CELLS = [
    Case("gpt", dp=2, zero=2, num_layers=2, global_batch_size=8),
    Case("gpt_untied", dp=4, zero=2, num_layers=3, global_batch_size=8),
    Case("llama", tp=2, dp=2, zero=2, sequence_parallel=True, num_layers=3, global_batch_size=8),
    Case("mqa_rope_bias", tp=2, dp=2, zero=2, head_tokens=7, num_layers=2, global_batch_size=8),
    Case("gpt", pp=2, dp=2, zero=2, num_layers=4, global_batch_size=8),
    Case("gpt", pp=2, vpp=2, dp=2, zero=2, head_tokens=5, num_layers=4, global_batch_size=8, offload=1),
    Case("llama", pp=2, dp=2, zero=2, schedule="zb_h1", head_tokens=5, num_layers=4, global_batch_size=10),
    Case(
        "gpt",
        pp=2,
        vpp=2,
        dp=2,
        zero=2,
        schedule="zbv",
        head_tokens=5,
        layers_per_stage=(2, 1, 3, 2),
        global_batch_size=8,
    ),
    Case("qwen", cp=2, dp=2, zero=2, documents=True, num_layers=2, global_batch_size=8),
    Case(
        "mla, kinds",
        pp=3,
        dp=2,
        zero=2,
        documents=True,
        recompute=SELECTIVE,
        modules=CHEAP_WITH_ROPE,
        global_batch_size=6,
    ),
    Case("deepseek", dp=4, ep=2, zero=2, dispatch="all_to_all", global_batch_size=8),
    Case("deepseek", pp=2, vpp=2, dp=2, ep=2, zero=2, schedule="zbv", global_batch_size=8),
]
"""One or more of every feature, each with several microbatches."""


@pytest.mark.distributed
@pytest.mark.parametrize("case", [replace(case, zero=2 + number % 2) for number, case in enumerate(CELLS)], ids=str)
def test_cells_equal_the_oracle(case: Case) -> None:
    compare(case)


REPLICATED = [
    Case("gpt", dp=4, dp_replicas=2, num_layers=2, global_batch_size=8),
    Case("gpt_untied", dp=4, dp_replicas=4, zero=3, num_layers=2, global_batch_size=8),
    Case("mqa_rope_bias", tp=2, dp=4, dp_replicas=2, zero=3, num_layers=3, global_batch_size=8),
    Case("gpt", pp=2, dp=4, dp_replicas=2, zero=2, num_layers=4, global_batch_size=8, bucket_bytes=1),
    Case("qwen", cp=2, dp=2, dp_replicas=2, zero=2, documents=True, num_layers=2, global_batch_size=8),
    Case("deepseek", dp=4, ep=2, dp_replicas=2, zero=3, dispatch="all_to_all", global_batch_size=8),
]
"""Replicas of the state (HSDP) with every stage; tied ends, replicated heads, parts of samples, experts."""


@pytest.mark.distributed
@pytest.mark.parametrize("case", REPLICATED, ids=str)
def test_replicas_of_the_state_equal_the_oracle(case: Case) -> None:
    compare(case)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", [replace(case, zero=3 - number % 2) for number, case in enumerate(CELLS)], ids=str)
def test_cells_of_the_other_stage_equal_the_oracle(case: Case) -> None:
    compare(case)


UPDATES = [
    Case("gpt", dp=2, groups=True, num_layers=3, global_batch_size=8),
    Case("gpt", dp=4, frozen=("layers.0.*", "embedding.*"), num_layers=3, global_batch_size=8),
    Case("llama", tp=2, dp=2, optimizer="extension", num_layers=3, global_batch_size=8),
]


ENDS = [
    Case("llama", tp=2, dp=4, sequence_parallel=True, num_layers=3, global_batch_size=8),
    Case("llama", dp=3, recompute=("full", "uniform", 2), head_tokens=7, num_layers=2, global_batch_size=9),
    Case("qwen", cp=2, dp=2, documents=True, offload_state=True, num_layers=2, global_batch_size=8),
    Case("llama", dp=4, schedule="gpipe", num_layers=1, global_batch_size=8),
    Case("gpt_untied", dp=4, frozen=("embedding.*",), num_layers=2, global_batch_size=8),
]
"""Embedding and head are cut apart from the layers where three or more ranks own a part of each."""


def more_cells() -> list[Case]:
    """The covering layouts of the other features, on two or more ranks that share gradients, with as many microbatches.

    In turn, the state of one stage or the other is in host memory.
    """
    cells = []
    for number, case in enumerate((*COVERING, *COVERING_TOO, *KINDS, *EXPERTS, *LATENTS, *MTP, *UPDATES, *ENDS)):
        if case.dp * case.cp == 1:
            case = replace(case, dp=2, global_batch_size=2 * case.global_batch_size)
        if case.world_size <= 8:
            cells += [replace(case, zero=zero, offload_state=(number + zero) % 2 == 0) for zero in (2, 3)]
    return list(dict.fromkeys(cells))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", more_cells(), ids=str)
def test_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case)


def gradients(rank: int, case: Case) -> list[Piece]:
    engine, batches = build_rank(rank, case)
    engine.forward_backward(batches.next_step())
    batches.close()
    return owned_pieces(engine, "grads")


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt_untied", dp=4, num_layers=3, global_batch_size=4),
        Case("mqa_rope_bias", tp=2, dp=2, sequence_parallel=True, dtype="bf16", num_layers=3, global_batch_size=2),
        Case("deepseek", dp=4, ep=2, dtype="bf16", global_batch_size=4),
    ],
    ids=str,
)
def test_with_one_microbatch_gradients_have_the_bits_of_zero_1(case: Case) -> None:
    shapes = {spec.name: spec.shape for spec in model_specs(case.config().model)}
    found = []
    for zero in (1, 2, 3):
        pieces = [piece for rank in run_ranks(gradients, case.world_size, replace(case, zero=zero)) for piece in rank]
        trained = {piece.name for piece in pieces}
        found.append(assemble({name: shapes[name] for name in trained}, pieces, tolerance=0.0))
    assert found[0].keys() == found[1].keys() == found[2].keys()
    for name, wanted in found[0].items():
        assert torch.equal(found[1][name], wanted) and torch.equal(found[2][name], wanted), name


def poisoned(rank: int, case: Case, weights: dict[str, torch.Tensor], num_steps: int) -> RankResult:
    """Run a case with NaN in every slot of gradients from its last sum to its next gradient, in stale owned parts, and in every
    slot of weights before a gather, and after an update."""
    free, start, post, clear = Slot.free, Bucket.start, Bucket.post_gather, WeightSlots.clear

    def spoiled(self: Slot) -> None:
        free(self)
        self.grads.fill_(torch.nan)

    def stale(self: Bucket, *args: Any) -> None:
        if self.slot is not None:
            self.owned_grads.fill_(torch.nan)
        start(self, *args)

    def gathered(self: Bucket) -> None:
        if self.weight_slots is not None:
            self.weights.fill_(torch.nan)
        post(self)

    def cleared(self: WeightSlots) -> None:
        clear(self)
        for bucket in self._buckets:
            bucket.weights.fill_(torch.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "post_gather", gathered)
        patch.setattr(WeightSlots, "clear", cleared)
        patch.setattr(Slot, "free", spoiled)
        patch.setattr(Bucket, "start", stale)
        return run_case(rank, case, weights, num_steps)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        Case("llama", pp=2, dp=2, zero=2, schedule="zb_h1", num_layers=4, global_batch_size=8),
        Case("deepseek", dp=4, ep=2, zero=3, global_batch_size=8),
        Case("llama", dp=2, zero=3, recompute=("full", "uniform", 2), num_layers=4, global_batch_size=8),
        Case("gpt_untied", dp=4, zero=3, num_layers=2, global_batch_size=8),
    ],
    ids=str,
)
def test_nobody_reads_what_no_gradient_has_written(case: Case) -> None:
    weights = weights_of(case.model, case.num_layers)
    alone = Case(case.model, num_layers=case.num_layers, global_batch_size=case.global_batch_size)
    check(run_ranks(poisoned, case.world_size, case, weights, 2), run_oracle(alone, weights, 2), weights, case)
