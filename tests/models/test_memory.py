"""The memory of a rank from its configuration, against what its step holds."""

from typing import Any

import pytest

from engine.config import Config, parallel_sizes
from engine.config_load import load_config
from engine.config_problems import with_value
from engine.config_rules import problems
from engine.footprint.run import Footprint
from models.memory import predicted_memory, savings
from tests.documented import ROOT
from tests.harness import run_ranks
from tests.models.test_activations import CI, GPT, LLAMA, SLOW, config_of, ends_of_all


def deeper(config: Config, **sections: dict[str, Any]) -> Config:
    tree = config.model_dump()
    return Config.model_validate(tree | {name: tree[name] | fields for name, fields in sections.items()})


AGAIN = {"granularity": "full", "num_layers": 2}
MANY = {
    "interleaved": deeper(
        config_of(LLAMA, tp=2),
        model={"num_layers": 8},
        parallel={"vpp": 2, "dp": 2},
        train={"global_batch_size": 32},
    ),
    "groups of layers again": deeper(
        config_of(LLAMA, tp=2, recompute=AGAIN), model={"num_layers": 8}, train={"global_batch_size": 16}
    ),
    "an uneven group": deeper(
        config_of(LLAMA, tp=2, recompute=AGAIN), model={"num_layers": 6}, train={"global_batch_size": 8}
    ),
    "attention again": deeper(
        config_of(GPT, tp=2, attention="explicit", recompute={"granularity": "selective"}),
        train={"global_batch_size": 16},
    ),
    "all forwards first": deeper(config_of(LLAMA, tp=1), schedule={"name": "gpipe"}, train={"global_batch_size": 8}),
}


def most_kept(config: Config, footprint: Footprint) -> set[int]:
    """What activations and logits may have come to at most: their own maxima need not be of the same moment."""
    activations, logits = (footprint.most.get(kind, 0) for kind in ("activations", "logits"))
    if logits and config.schedule.name == "gpipe":
        # A footprint runs one batch again and again, so the mask of microbatches in flight is counted once.
        mask_bytes = config.train.micro_batch_size * config.model.seq_length
        activations += (footprint.num_microbatches - 1) * mask_bytes
    return {activations + logits} if config.recompute.granularity != "full" else {activations, activations + logits}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "configs", [pytest.param(MANY, id="ci"), pytest.param(CI | SLOW, id="rest", marks=pytest.mark.slow)]
)
def test_a_step_holds_what_was_predicted(configs: dict[str, Config]) -> None:
    (found,) = run_ranks(ends_of_all, 1, configs, timeout_seconds=600)
    for name, config in configs.items():
        for pp, footprint in enumerate(found[name]):
            memory = predicted_memory(config, parallel_sizes(config), pp)
            state = {"parameters": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
            assert state == footprint.state, f"{name}, pp {pp}"
            assert memory.activations in most_kept(config, footprint), f"{name}, pp {pp}"


ONE_CARD_BYTES = 141e9
ON_ONE_CARD = ("tp=1", "dp=1", "sequence_parallel=false")
NARROW = ("precision.masters=split", "precision.moments=bf16")


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ((), 186.0e9),
        (("model.seq_length=4096", *NARROW), 117.1e9),
        (NARROW, 137.8e9),
        ((*NARROW, "recompute.granularity=full"), 100.7e9),
    ],
    ids=["as it is", "4096 tokens, narrow state", "narrow state", "8192 tokens, narrow state, recomputed"],
)
def test_an_8b_model_on_one_card(choices: tuple[str, ...], expected: float) -> None:
    """With narrow state weights, gradients and optimizer of 8.03e9 parameters are 12 bytes each, 96.4 GB."""
    layout = [f"parallel.{each}" for each in ON_ONE_CARD]
    config = load_config(ROOT / "configs" / "llama3_8b.yaml", [*layout, *choices], {})
    memory = predicted_memory(config, parallel_sizes(config), 0)
    assert memory.total == pytest.approx(expected, rel=1e-3)
    assert (memory.total < ONE_CARD_BYTES) == bool(choices)
    state = memory.total - memory.activations
    assert state == pytest.approx(8.0303e9 * (12 if choices else 18), rel=1e-3)


def test_savings_are_legal_and_save_what_they_say() -> None:
    config = deeper(
        config_of(LLAMA, tp=2, attention="explicit"),
        model={"num_layers": 8},
        parallel={"dp": 4},
        train={"global_batch_size": 32},
    )
    sizes = parallel_sizes(config)
    found = list(savings(config, 0))
    assert [saving.key for saving in found] == [
        "kernels.attention",
        "precision.masters",
        "recompute.granularity",
        "parallel.sequence_parallel",
        "train.micro_batch_size",
        "recompute.granularity",
        "parallel.tp",
        "parallel.pp",
    ]
    for saving in found:
        assert saving.total < predicted_memory(config, sizes, 0).total
        changed = with_value(config, saving.key, saving.value)
        if saving.key in ("parallel.tp", "parallel.pp"):
            changed = with_value(changed, "parallel.dp", 2)
        assert problems(changed, 16) == []
        assert predicted_memory(changed, parallel_sizes(changed), 0).total == saving.total


def test_what_is_not_legal_is_not_offered() -> None:
    dropout = config_of(GPT, tp=8, attention="explicit")
    keys = [saving.key for saving in savings(dropout, 0)]
    assert "kernels.attention" not in keys, "the fused kernel has no such dropout"
    assert "parallel.tp" not in keys, "there are 8 heads"
    assert "parallel.pp" not in keys, "no dp is left to give"
