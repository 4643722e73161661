"""Costs from FLOPs: they add up to what a step executes, and documents change what they should."""

from pathlib import Path

import pytest

from triaxis.engine.config.load import load_config
from triaxis.engine.config.plan import parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.data.document_statistics import DocumentStatistics, one_document_per_sample
from triaxis.engine.telemetry.record.flops import hardware_flops_per_token, layer_flops
from triaxis.launch.simulate.costs import DocumentDraws, flops_costs

ROOT = Path(__file__).parents[3]


def config_of(*overrides: str) -> Config:
    return load_config(ROOT / "configs" / "gpt_tiny.yaml", list(overrides), {}, world_size=None)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["recompute.granularity=full", "recompute.method=uniform"],
        ["recompute.granularity=selective"],
        ["recompute.head_tokens=16"],
    ],
)
def test_they_are_the_flops_of_a_step(overrides: list[str]) -> None:
    config = config_of(*overrides)
    costs = flops_costs(config, parallel_sizes(config))
    counts = [len(stage.layers) for stage in stages_of(config)]
    layers = layer_flops(config.model, config.recompute, counts)
    unit = sum(layer.gemms + layer.attention for layer in layers) / len(layers)
    total = sum(costs.forward) + sum(costs.input_grad) + sum(costs.weight_grad)
    assert total * unit == pytest.approx(hardware_flops_per_token(config.model, config.recompute, counts))


def test_weight_gradients_have_neither_attention_nor_the_head() -> None:
    config = config_of()
    costs = flops_costs(config, parallel_sizes(config))
    # One layer per stage: all alike, but for the head.
    assert len(set(costs.weight_grad)) == 1 and len(set(costs.forward[:-1])) == 1
    assert costs.forward[0] == pytest.approx(1) and costs.forward[-1] > 1
    assert costs.input_grad[0] == pytest.approx(2 - costs.weight_grad[0])


def test_documents_scale_any_cost_model() -> None:
    config, short = config_of(), 16
    sizes, length = parallel_sizes(config), config.model.seq_length
    samples = ((length,), (short,) * (length // short))
    documents = DocumentStatistics(length, ((samples[0] * 4 + samples[1] * 4,),))
    whole = flops_costs(config, sizes)
    draws = DocumentDraws(config, sizes, documents, whole, seed=3)
    steps = draws.draw(8, 4)
    found = {round(costs.forward[0], 9) for step in steps for costs in step}
    of_short = flops_costs(config, sizes, DocumentStatistics(length, ((samples[1],),))).forward[0]
    assert found == {round(whole.forward[0], 9), round(of_short, 9)} and of_short < whole.forward[0]
    assert of_short < draws.mean.forward[0] < whole.forward[0]
    assert draws.draw(8, 4) == steps
    assert DocumentDraws(config, sizes, one_document_per_sample(length), whole, 1).mean == whole
