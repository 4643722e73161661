"""FLOPs that frozen parameters spare, counted by hand; what trains nothing of its own costs its forward alone."""

import pytest

from tests.parity.cases import Case
from triaxis.engine.config.plan import parallel_sizes, stages_of
from triaxis.engine.config.tree import Config
from triaxis.engine.telemetry.record.flops import hardware_flops_per_token, model_flops_per_token
from triaxis.models.predict.frozen_flops import unneeded_flops
from triaxis.models.predict.step_time.flops_costs import flops_costs

H, F, V, S, LAYERS = 16, 24, 43, 8, 4


def case_of(*frozen: str, **choices: object) -> Config:
    sizes = {"num_layers": LAYERS, "global_batch_size": 4, "dtype": "bf16"} | choices
    return Case("gpt_untied", frozen=frozen, **sizes).config()  # type: ignore[arg-type]


def counted(config: Config) -> tuple[int, int]:
    stages = [len(stage.layers) for stage in stages_of(config)]
    return unneeded_flops(config, config.recompute, stages)


def test_a_layer_below_costs_its_forward_and_a_frozen_weight_no_gradient() -> None:
    model = case_of().model
    assert (model.hidden_size, model.ffn_size, model.vocab_size, model.seq_length) == (H, F, V, S)
    # Weights of a layer's products, and scores and weighted sum of a query that sees S / 2 keys on average.
    of_layer, attention = 2 * (4 * H * H + 2 * H * F), 4 * H * S // 2
    assert counted(case_of()) == (0, 0)
    assert counted(case_of("embedding.*")) == (0, 0), "a look-up costs nothing"
    below = counted(case_of("embedding.*", "layers.[0-1].*"))
    assert below == (2 * 2 * (of_layer + attention),) * 2
    assert counted(case_of("*.down.weight")) == (LAYERS * 2 * H * F,) * 2
    assert counted(case_of("head.weight"))[0] == 2 * H * V
    assert counted(case_of("embedding.*", "layers.*")) == (LAYERS * 2 * (of_layer + attention),) * 2


def test_what_is_left_is_a_forward_where_the_head_alone_is_trained() -> None:
    config = case_of("embedding.*", "layers.*", "final_norm.*", recompute=("full", "uniform", 1))
    of_model, of_hardware = counted(config)
    left = model_flops_per_token(config.model) - of_model
    of_head = 2 * H * V
    assert left - 3 * of_head == (model_flops_per_token(config.model) - 3 * of_head) / 3
    executed = hardware_flops_per_token(config.model, config.recompute, [LAYERS]) - of_hardware
    padding = 3 * 2 * (config.model.padded_vocab_size - V) * H
    assert executed == left + padding, "no layer is recomputed"


def test_stages_without_a_backward_cost_their_forward_in_a_simulated_step() -> None:
    config = case_of("embedding.*", "layers.[0-1].*", "layers.3.mlp.down.weight", pp=4)
    costs, plain = flops_costs(config, parallel_sizes(config)), flops_costs(case_of(pp=4), parallel_sizes(config))
    assert costs.forward == plain.forward
    assert list(costs.input_grad[:2]) == list(costs.weight_grad[:2]) == [0, 0]
    assert costs.input_grad[2:] == plain.input_grad[2:]
    assert costs.weight_grad[2] == plain.weight_grad[2]
    assert costs.weight_grad[3] == pytest.approx(plain.weight_grad[3] * (1 - H * F / (4 * H * H + 2 * H * F)))
