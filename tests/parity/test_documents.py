"""A packed sample is its documents: losses and gradients are the sums of each document's own run."""

import pytest
import torch

from engine.data.documents import Documents, document_positions
from engine.data.loader import MicroBatch
from engine.step import Engine
from tests.parity.cases import Case, build_rank, load_weights, weights_of

LENGTHS = (3, 1, 4)


def gradients(engine: Engine, batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss sum and gradients of one microbatch alone."""
    loss_sum, _ = engine.forward_backward([batch]).tolist()
    found = {name: parameter.bound_main_grad().clone() for name, parameter in engine.parameters.items()}
    return loss_sum, found


@pytest.mark.parametrize("attention", ["sdpa", "blocks", "explicit"])
@pytest.mark.parametrize("model", ["gpt", "kinds"])
def test_gradients_of_a_packed_sample_are_the_sum_of_its_documents(model: str, attention: str) -> None:
    """`gpt` has learned positions, `kinds` windows, sinks and rotation."""
    case = Case(model, num_layers=4, global_batch_size=1, attention=attention, documents=True)
    engine, batches = build_rank(0, case)
    batches.close()
    load_weights(engine, {name: weight.detach() for name, weight in weights_of(model, 4).items()})
    tokens = torch.arange(9).remainder(7).unsqueeze(0)
    counted = torch.ones(1, 8, dtype=torch.bool)
    positions = torch.from_numpy(document_positions(LENGTHS)).unsqueeze(0)
    packed = MicroBatch(tokens[:, :-1], tokens[:, 1:], counted, positions, [0], 8, Documents.of([LENGTHS]))
    loss_sum, grads = gradients(engine, packed)

    sum_of_losses, sums = 0.0, {name: torch.zeros_like(grad) for name, grad in grads.items()}
    start = 0
    for length in LENGTHS:
        stop = start + length
        # Alone at the start of a sample; the tokens behind it see it, but are not counted.
        alone = torch.zeros(1, 8, dtype=torch.int64)
        labels, mask = alone.clone(), torch.zeros(1, 8, dtype=torch.bool)
        alone[0, :length], labels[0, :length], mask[0, :length] = (
            tokens[0, start:stop],
            tokens[0, start + 1 : stop + 1],
            True,
        )
        one = MicroBatch(alone, labels, mask, torch.arange(8).unsqueeze(0), [0], length)
        loss, of_document = gradients(engine, one)
        sum_of_losses += loss
        for name, grad in of_document.items():
            sums[name] += grad
        start = stop
    assert loss_sum == pytest.approx(sum_of_losses, rel=1e-12)
    for name, grad in grads.items():
        torch.testing.assert_close(
            grad, sums[name], rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
