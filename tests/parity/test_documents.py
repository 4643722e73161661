"""A packed sample is its documents: gradients are the sums of each document's own run."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from tests.parity.cases import Case, build_rank, load_weights, weights_of


@pytest.mark.parametrize("attention", ["sdpa", "blocks", "explicit"])
@pytest.mark.parametrize("model", ["gpt", "kinds"])
def test_gradients_of_packed_documents_are_the_sum_of_those_of_each_alone(model: str, attention: str) -> None:
    """`gpt` has learned positions, `kinds` windows, sinks and rotation."""
    case = Case(model, attention=attention, num_layers=4, micro_batch_size=4, global_batch_size=4, documents=True)
    engine, batches = build_rank(0, case)
    load_weights(engine, {name: weight.detach() for name, weight in weights_of(model, 4).items()})
    (packed,) = batches.next_step()
    batches.close()
    assert packed.documents is not None
    ends = [list(accumulate(row)) for row in packed.documents.lengths]
    alone = [
        replace(
            packed,
            tokens=packed.tokens[row : row + 1, stop - length : stop],
            labels=packed.labels[row : row + 1, stop - length : stop],
            loss_mask=packed.loss_mask[row : row + 1, stop - length : stop],
            position_ids=torch.arange(length).view(1, -1),
            sample_ids=[0],
            documents=None,
        )
        for row, lengths in enumerate(packed.documents.lengths)
        for length, stop in zip(lengths, ends[row], strict=True)
    ]
    assert len(alone) > 4 and min(each.tokens.shape[1] for each in alone) == 1
    grads = []
    for each in (packed, *alone):
        engine.forward_backward([each])
        grads.append({name: one.bound_main_grad().clone() for name, one in engine.parameters.items()})
    for name, whole in grads[0].items():
        total = torch.stack([each[name] for each in grads[1:]]).sum(0)
        assert float((whole - total).norm()) <= 1e-13 * (1 + float(whole.norm())), name
