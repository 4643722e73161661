"""Costs of an extension's parts: with what is measured in two layers, the formulas are those of any depth and layout."""

from fractions import Fraction
from pathlib import Path

import pytest

from tests.harness import run_ranks
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.extension_costs import with_costs
from triaxis.engine.config.quantities.plan import parallel_sizes, stages_of
from triaxis.engine.config.schema.extension_parts import NO_COSTS, OwnCosts
from triaxis.engine.config.tree import Config
from triaxis.engine.telemetry.record.flops import model_flops_per_token
from triaxis.launch.footprint.own_costs import OwnCostsMeter
from triaxis.launch.footprint.run import Footprints
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.activation_memory import kept_bytes
from triaxis.models.predict.traffic import expected_traffic, measured_traffic

PARTS, WHOLE = (Path(__file__).with_name(name) for name in ("own_parts.py", "own_whole.py"))
LINEAR = Path(__file__).parents[2] / "models" / "gpt" / "own_linear_attention.py"
LAYOUTS = {
    "one process": "{tp: 1, pp: 1, vpp: 1, dp: 1, sequence_parallel: false}",
    "3D": "{tp: 2, pp: 2, vpp: 2, dp: 2, sequence_parallel: true}",
    "context": "{tp: 2, pp: 1, vpp: 1, cp: 2, dp: 1, sequence_parallel: false}",
}


def config_of(extension: Path, layout: str, *more: str) -> Config:
    words = [f"model.extension={extension}", f"parallel={LAYOUTS[layout]}", "data={synthetic: true}", *more]
    return load_config("gpt_tiny", words)


def counted(rank: int, layouts: dict[str, tuple[str, ...]]) -> dict[str, tuple[int, int, OwnCosts]]:
    """Bytes that the first pipeline rank keeps, those of the formulas with what was measured, and the latter."""
    meter, found = OwnCostsMeter(), {}
    for layout, more in layouts.items():
        config = config_of(PARTS, layout, *more)
        sizes = parallel_sizes(config)
        costs = meter(config, sizes)
        footprints = Footprints(config, build_chunks)
        step, stages = footprints.of(0), stages_of(config)
        predicted = sum(kept_bytes(with_costs(footprints.config, costs), sizes, stages[one]) for one in step.stages)
        found[layout] = sum(saved.num_bytes for saved in step.saved), predicted, costs
    return found


@pytest.mark.distributed
def test_memory_and_flops_are_those_of_the_parts() -> None:
    layouts = {"one process": ("precision.dtype=bf16",), "3D": (), "context": ("train.micro_batch_size=2",)}
    (found,) = run_ranks(counted, 1, layouts)
    for layout, (kept, predicted, costs) in found.items():
        assert kept == predicted and costs.kept > 0, layout
        config = config_of(PARTS, layout)
        h, f = config.model.hidden_size, config.model.ffn_size
        assert costs.weights == 3 * h * (5 * h - f) and not costs.sent, layout
        more = model_flops_per_token(with_costs(config, costs).model) - model_flops_per_token(config.model)
        assert more == 6 * config.model.num_layers * costs.weights > 0


def another_kind_of_layer(rank: int) -> None:
    """Linear attention sends its states over cp, gathers its input twice over tp, and takes no more per token in longer rows."""
    meter, costs = OwnCostsMeter(), {}
    for layout, more in {"context": (), "3D": ("recompute.granularity=full", "recompute.num_layers=1")}.items():
        plain = config_of(LINEAR, layout, *more)
        sizes = parallel_sizes(plain)
        costs[layout] = meter(plain, sizes)
        config = with_costs(plain, costs[layout])
        footprints = Footprints(config, build_chunks, full=True)
        for number in range(0, sizes.world_size, 3):
            found = footprints.of(number)
            expected = expected_traffic(config, sizes, found.coordinates, stages_of(config))
            assert measured_traffic(found.events) == expected, (layout, number)
    assert {(one.axis, one.op) for one in costs["context"].messages} >= {("cp", "all_gather"), ("tp", "all_reduce")}
    assert costs["context"].sent_over_cp and "over cp" in str(costs["context"])
    flops = []
    for length in (64, 128):
        config = config_of(LINEAR, "one process", f"model.seq_length={length}")
        flops.append(model_flops_per_token(with_costs(config, meter(config, parallel_sizes(config))).model))
    assert flops[0] == flops[1]


@pytest.mark.slow
@pytest.mark.distributed
def test_another_kind_of_layer_is_counted_with_its_messages() -> None:
    run_ranks(another_kind_of_layer, 1)


def costs_of(rank: int, extension: Path, layout: str, *more: str) -> OwnCosts:
    config = config_of(extension, layout, *more)
    return OwnCostsMeter()(config, parallel_sizes(config))


@pytest.mark.distributed
def test_messages_that_are_missing_count_too() -> None:
    (costs,) = run_ranks(costs_of, 1, WHOLE, "3D")
    config = config_of(WHOLE, "3D")
    # Ours gathers its input, and again for the gradient of the weight unless it was kept, and the gradient of its output;
    # it scatters its output and the gradient of its input. One of two ranks sends half of a tensor of b s h.
    gathers, scatters = 2 + (config.recompute.gathered_inputs != "keep"), 2
    assert costs.calls == -(gathers + scatters)
    assert costs.sent == -Fraction((gathers + scatters) * 4 * config.model.hidden_size, 2)


def of_data(rank: int, folder: str) -> tuple[str, OwnCosts, OwnCosts]:
    path = Path(folder) / "of_data.py"
    text = "from tests.launch.footprint.own_parts import OfData\n"
    text += "from triaxis.engine.config.schema.extension_parts import Extension, OwnCosts\n"
    text += "class Mine(OfData):\n    def forward(self, x):\n        return super().forward(x)\n"
    path.write_text(f"{text}extension = Extension(mlp=Mine)\n")
    unknown = costs_of(0, path, "one process")
    path.write_text(f"{text}extension = Extension(mlp=Mine, costs=lambda config, sizes: OwnCosts(weights=sizes.tp))\n")
    given = costs_of(0, path, "one process")
    path.write_text(text + "extension = Extension(corpora={'x': list})\n")
    return str(path), unknown, given if costs_of(0, path, "one process") == NO_COSTS else NO_COSTS


@pytest.mark.distributed
def test_a_part_that_reads_its_data_is_named_and_may_give_its_costs(tmp_path: Path) -> None:
    ((path, unknown, given),) = run_ranks(of_data, 1, str(tmp_path))
    assert unknown.unknown.startswith(f"{path}, line 5, in forward: ") and "costs=.." in str(unknown)
    assert given == OwnCosts(weights=1)


@pytest.mark.distributed
def test_a_kernel_that_runs_on_a_card_alone_keeps_no_run_from_its_start() -> None:
    (costs,) = run_ranks(costs_of, 1, PARTS, "one process", "kernels.attention=cudnn")
    assert costs.unknown.startswith("ConfigError: ") and "kernels.attention" in costs.unknown


def test_costs_change_no_configuration_that_is_written() -> None:
    config = config_of(PARTS, "3D")
    costs = OwnCosts(Fraction(100), weights=-6, sent=Fraction(5), calls=2)
    measured = with_costs(config, costs)
    assert measured.model_dump() == config.model_dump() and measured.model.own_costs == costs
    assert str(costs).endswith(
        "+100 B kept per token of a rank, -36 FLOPs per token, +5 B over tp per token of a rank, in +2 calls"
    )
    assert with_costs(load_config("gpt_tiny"), NO_COSTS).model.own_costs == NO_COSTS
