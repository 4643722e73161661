"""Costs from FLOPs: they add up to what a step executes."""

import pytest

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.telemetry.record.flops import hardware_flops_per_token, layer_flops
from triaxis.models.predict.step_time.flops_costs import flops_costs


def config_of(*overrides: str) -> Config:
    return load_config("gpt_tiny", list(overrides))


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
