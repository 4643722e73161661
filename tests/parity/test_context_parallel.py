"""Context parallelism equals one process: loss, gradients and weights, float64, with everything that acts on a part of a row."""

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch

from tests.parity.cases import Case, dataset
from tests.parity.test_parity import SELECTIVE, SMALL, SMALL_STAGES, compare
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.data.loader import Batches, MicroBatch
from triaxis.engine.layout.rank_grid import ParallelSizes

FULL = ("full", "uniform", 1)

COVERING = (
    Case("llama", cp=2, **SMALL),
    Case("gpt_dropout", cp=2, dp=2, documents=True, **SMALL),
    Case("llama", cp=2, tp=2, sequence_parallel=True, documents=True, **SMALL),
    Case("kinds", cp=2, pp=2, vpp=2, documents=True, recompute=FULL, **SMALL_STAGES),
    Case(
        "kinds_dropout",
        cp=2,
        tp=2,
        sequence_parallel=True,
        recompute=SELECTIVE,
        modules=("attention", "norm"),
        num_layers=4,
        global_batch_size=2,
    ),
    Case("gpt_dropout", cp=4, cp_method="ulysses", documents=True, **SMALL),
    Case("qwen", cp=2, tp=2, sequence_parallel=True, cp_method="ulysses", documents=True, micro_batch_size=2, **SMALL),
)
"""Pairs of cp with each other axis and feature: each is in some case, most with documents that end inside of a part."""

MORE = (
    Case("llama", cp=2, tp=2, sequence_parallel=True, documents=True),
    Case("kinds_dropout", cp=2, tp=2, sequence_parallel=True, recompute=SELECTIVE, modules=("attention", "norm")),
    Case("gpt_dropout", cp=4, dp=2, cp_method="ulysses", documents=True),
    Case("kinds_capped", cp=4, tp=2, documents=True),
    Case("gpt", cp=4, micro_batch_size=2),
    Case("mqa_rope_bias", cp=2, tp=4, micro_batch_size=2, documents=True),
    Case("qwen", cp=2, pp=2, recompute=SELECTIVE, modules=("norm", "rope"), documents=True, micro_batch_size=2),
    Case("kinds_tied", cp=2, pp=2, offload=2, gathered_kv="keep"),
    Case("kinds", cp=2, pp=2, vpp=2, cp_method="ulysses", recompute=FULL, documents=True),
    Case("llama", cp=4, tp=2, sequence_parallel=False),
    Case("llama", cp=2, tp=2, pp=2, sequence_parallel=True, documents=True, recompute=FULL),
    Case("gpt_untied", cp=2, dp=2, pp=2, micro_batch_size=2),
    Case("kinds", cp=4, dp=2, documents=True, head_tokens=3),
    Case("kinds", cp=2, tp=2, pp=2, vpp=2, sequence_parallel=True, layers_per_stage=(1, 3, 2, 2)),
    Case("gpt_dropout", cp=4, tp=2, sequence_parallel=False, documents=True, micro_batch_size=2),
    Case("window", cp=2, documents=True, attention="blocks"),
    Case("sinks", cp=4, attention="explicit", documents=True),
    Case("softcap", cp=2, tp=2, documents=True),
    Case("llama", cp=2, optimizer="sgd", documents=True),
    Case("qwen", cp=2, tp=2, gathered_kv="keep", recompute=SELECTIVE, modules=("norm", "rope"), documents=True),
    Case("gpt", cp=4, gathered_kv="keep", recompute=FULL),
    Case("kinds_dropout", cp=2, cp_method="ulysses", recompute=SELECTIVE, modules=("attention", "norm")),
    Case("kinds_tied", cp=2, pp=2, cp_method="ulysses", offload=2),
    Case("llama", cp=2, tp=1, pp=2, cp_method="ulysses", recompute=SELECTIVE, micro_batch_size=2),
)


def parts_of(case: Case) -> Iterator[MicroBatch]:
    """Yield the microbatches of the first step, of every rank of its samples."""
    config = case.config()
    for rank in range(case.cp):
        batches = Batches(
            dataset(config),
            global_batch_size=case.global_batch_size,
            micro_batch_size=case.micro_batch_size,
            dp=1,
            dp_rank=0,
            consumed_samples=0,
            device=torch.device("cpu"),
            attention=config.data.attention,
            positions=config.data.positions,
            cut=ContextCut.of(config, ParallelSizes(cp=case.cp), rank),
        )
        yield from batches.next_step()
        batches.close()


def test_some_rank_has_no_label_and_some_document_ends_at_a_cut() -> None:
    """The situations that were bugs elsewhere are in the first step of the covering layouts."""
    parts = {case: list(parts_of(case)) for case in COVERING}
    without_labels = [case for case, found in parts.items() if any(part.num_tokens == 0 for part in found)]
    assert {case.cp_method for case in without_labels} == {"auto", "ulysses"}
    ends_at_a_cut = [
        case
        for case, found in parts.items()
        for part in found
        if part.part is not None and part.documents is not None
        for runs, lengths in zip(part.part.runs, part.documents.lengths, strict=True)
        if {stop for _, stop in runs} & set(accumulate(lengths[:-1]))
    ]
    assert {case.cp_method for case in ends_at_a_cut} == {"auto", "ulysses"}


@pytest.mark.distributed
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering_layouts_equal_the_oracle(case: Case) -> None:
    compare(case)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_layouts_equal_the_oracle(case: Case) -> None:
    compare(case)
