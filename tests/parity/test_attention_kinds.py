"""Layers with attentions of their own, and documents, equal the oracle: each option alone, and together in covering layouts."""

from dataclasses import replace

import pytest
import torch

from tests.harness import compiler
from tests.parity.attention_models import ATTENTION
from tests.parity.cases import Case, build_rank, load_weights, run_case, run_oracle, weights_of
from tests.parity.test_parity import ALL_PARTS, SELECTIVE, check, compare, oracle
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.data.documents import Documents
from triaxis.models.gpt.chunk import GPTChunk

STEPS = 2


def compare_here(case: Case) -> None:
    """One rank, in this process."""
    weights = weights_of(case.model, case.num_layers)
    check([run_case(0, case, weights, STEPS)], run_oracle(case, weights, STEPS), weights)


@pytest.mark.parametrize("option", ATTENTION)
def test_each_option_equals_the_oracle(option: str) -> None:
    compare_here(Case(option, global_batch_size=2))
    compare_here(Case(option, global_batch_size=2, micro_batch_size=2, documents=True))


@pytest.mark.parametrize(
    "case",
    [
        Case("kinds", attention="blocks", documents=True, micro_batch_size=2, global_batch_size=4),
        Case("kinds", attention="explicit", documents=True, micro_batch_size=2, global_batch_size=4),
        Case("kinds_capped", attention="explicit", documents=True, global_batch_size=4),
        Case("kinds", recompute=SELECTIVE, modules=ALL_PARTS, offload=8, documents=True, global_batch_size=4),
        Case("kinds", recompute=("full", "block", 3), offload=5, global_batch_size=4),
        Case("kinds_dropout", recompute=SELECTIVE, documents=True, micro_batch_size=2, global_batch_size=4),
        Case("kinds_capped", recompute=("full", "uniform", 3), global_batch_size=4),
        Case("gpt", documents=True, num_layers=2, global_batch_size=4),
    ],
    ids=str,
)
def test_kinds_together_equal_the_oracle(case: Case) -> None:
    compare_here(case)


COVERING = [
    Case("kinds", tp=2, sequence_parallel=True, num_layers=4, documents=True, micro_batch_size=2, global_batch_size=4),
    Case("kinds", pp=2, vpp=2, documents=True, recompute=SELECTIVE, modules=ALL_PARTS, offload=1, global_batch_size=4),
    Case("kinds_tied", pp=3, layers_per_stage=(1, 2, 1), num_layers=4, documents=True, global_batch_size=3),
    Case("kinds_capped", tp=4, sequence_parallel=True, num_layers=4, global_batch_size=2),
]
"""Every way of cutting, tied and untied, with replicas of key/value heads, kinds that differ between stages."""

COVERING_TOO = [
    Case("kinds", tp=2, pp=2, vpp=2, dp=2, sequence_parallel=True, documents=True),
    Case("kinds_dropout", tp=2, pp=2, dp=2, recompute=("full", "uniform", 1), documents=True, num_layers=4),
    Case(
        "kinds_tied",
        tp=2,
        pp=2,
        dp=2,
        sequence_parallel=True,
        recompute=("full", "block", 1),
        documents=True,
        num_layers=4,
    ),
    Case("kinds_capped", tp=2, pp=4, layers_per_stage=(1, 3, 2, 2), documents=True, head_tokens=3),
    *(Case(option, tp=2, pp=2, sequence_parallel=True, documents=True, global_batch_size=2) for option in ATTENTION),
]


@pytest.mark.distributed
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case, STEPS)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", COVERING_TOO, ids=str)
def test_more_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case, STEPS)


def test_each_option_changes_the_loss() -> None:
    """A model whose window is as long as its samples is the plain one."""
    losses = [oracle(Case(option), 1).loss for option in (*ATTENTION, "plain")]
    assert len({f"{loss:.6f}" for loss in losses}) == len(losses)


def test_documents_change_the_loss() -> None:
    """Were they ignored by the oracle and the engine alike, the cases above would prove nothing."""
    losses = {documents: oracle(Case("gpt", num_layers=2, documents=documents), 1).loss for documents in (False, True)}
    assert abs(losses[True] - losses[False]) > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "blocks", "explicit"])
def test_a_token_of_one_document_moves_no_logit_of_another(attention: str) -> None:
    case = Case("kinds", attention=attention, num_layers=4, micro_batch_size=2, dtype="bf16", documents=True)
    engine, batches = build_rank(0, case)
    batch = batches.next_step()[0]
    batches.close()
    (chunk,) = engine.chunks
    assert isinstance(chunk, GPTChunk) and batch.documents is not None
    chunk.train(False)
    before = chunk.logits(None, batch)
    row, lengths = next((row, lengths) for row, lengths in enumerate(batch.documents.lengths) if len(lengths) > 2)
    first, second = lengths[:2]
    batch.tokens[row, first : first + second] += 1
    changed = (chunk.logits(None, batch) != before).any(-1)
    assert changed[first : first + second, row].all()
    changed[first : first + second, row] = False
    assert not changed.any()


@pytest.mark.slow
@compiler()
def test_compiled_kernels_equal_the_oracle() -> None:
    compare_here(Case("kinds", compiled=True, documents=True, global_batch_size=2))


def test_one_document_per_row_has_the_bits_of_none() -> None:
    case = Case("llama", num_layers=2, micro_batch_size=2, global_batch_size=2)
    engine, batches = build_rank(0, case)
    load_weights(engine, {name: weight.detach() for name, weight in weights_of("llama", 2).items()})
    (batch,) = batches.next_step()
    batches.close()
    whole = replace(batch, documents=Documents.of([[8], [8]]))
    found = []
    for each in (batch, whole):
        engine.forward_backward([each])
        found.append([parameter.bound_main_grad().clone() for parameter in engine.parameters.values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_literal_list_is_the_repeated_pattern() -> None:
    model = Case("kinds").config().model
    literal = [kind.name for kind in model.kinds]
    assert literal == ["near", "near", "far", "free"] * 2
    spelt = with_value(Case("kinds").config(), "model.layers", literal).model
    assert spelt.kinds == model.kinds
    assert [kind.name for kind in with_value(Case("kinds").config(), "model.num_layers", 3).model.kinds] == literal[:3]
