"""muP: the coordinate check of 2203.03466 (appendix D.1), and the fields that make it.

Activations and logits of models of several widths are followed over some steps of Adam. Under muP their size does not depend on the
width; under one learning rate for all parameters, what a step changes grows with it.
"""

from typing import Any

import pytest
import torch

from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.quantities.update_settings import update_rule
from triaxis.engine.config.rules.check import problems
from triaxis.engine.config.schema.dotted import with_fields
from triaxis.engine.config.tree import Config
from triaxis.engine.data.datasets import open_run_datasets
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.train import build
from triaxis.launch.rank.batches import open_batches
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.mup import mup_fields
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import model_specs

pytestmark = pytest.mark.distributed

BASE, NARROW, WIDE = 64, 128, 512
"""The base itself is not compared: at its rate a width of 64 is far from the limit of wide models."""
STEPS = 4


def config_of(hidden_size: int, **fields: Any) -> Config:
    """A tiny model of a width; fields by their dotted names, with __ in place of the dot."""
    heads = hidden_size // 16
    model = (
        f"{{num_layers: 2, hidden_size: {hidden_size}, num_attention_heads: {heads}, seq_length: 32, vocab_size: 97}}"
    )
    config = load_config(
        None,
        [
            f"model={model}",
            f"model.ffn_hidden_size={4 * hidden_size}",
            "data={synthetic: true}",
            "train={steps: 10, global_batch_size: 4, micro_batch_size: 4}",
            "optimizer={lr: 0.01, weight_decay: 0.0, clip_grad: null}",
            "precision={dtype: fp32}",
        ],
    )
    usual = {"model.position": "rope", "model.bias": "none", "model.norm": "rmsnorm"}
    return with_fields(config, {**usual, **{key.replace("__", "."): value for key, value in fields.items()}})


def sizes_after(config: Config) -> dict[str, float]:
    """The mean size of each layer's output and of the logits after some steps, and by how much the logits have moved."""
    grid = RankGrid(parallel_sizes(config, 1), 1)
    topology = Topology(grid, 0, torch.device("cpu"), kv_heads=config.model.kv_heads, has_experts=False)
    engine = build(resolve_recompute(config, topology.sizes), topology, build_chunks)
    batches = open_batches(config, topology, open_run_datasets(config).train)
    steps = [batches.next_step() for _ in range(STEPS + 1)]
    batches.close()
    [chunk] = engine.chunks
    seen: dict[str, float] = {}

    def logits() -> torch.Tensor:
        chunk.train(False)
        with torch.no_grad():
            return chunk.logits(None, steps[-1][0])[..., : config.model.vocab_size]

    before = logits()
    for microbatches in steps[:STEPS]:
        engine.train_step(microbatches, config.optimizer.lr)

    def keep(name: str):
        def hook(module, inputs, output) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            seen[name] = float(hidden.abs().mean())

        return hook

    handles = [layer.register_forward_hook(keep(f"layer {n}")) for n, layer in enumerate(chunk.blocks)]
    after = logits()
    for handle in handles:
        handle.remove()
    topology.close()
    return {**seen, "logits": float(after.abs().mean()), "moved": float((after - before).abs().mean())}


def growth(tie: bool, *, mup: bool) -> dict[str, float]:
    """By which factor each size grows from a narrow model to one of four times its width."""
    sizes = []
    for hidden_size in (NARROW, WIDE):
        config = config_of(hidden_size, model__tie_embeddings=tie)
        sizes.append(sizes_after(with_fields(config, mup_fields(config, BASE)) if mup else config))
    narrow, wide = sizes
    return {name: wide[name] / narrow[name] for name in narrow}


@pytest.mark.parametrize("tie", [True, False])
def test_coordinates_do_not_depend_on_the_width(tie: bool) -> None:
    under_mup, standard = growth(tie, mup=True), growth(tie, mup=False)
    assert all(0.75 < ratio < 1.33 for ratio in under_mup.values()), under_mup
    assert standard["moved"] > 2.0, standard


def test_at_the_base_nothing_changes() -> None:
    config = config_of(BASE)
    same = with_fields(config, mup_fields(config, BASE, 16))
    assert {**same.model.model_dump(), "attention_scale": None} == config.model.model_dump()
    for spec in model_specs(config.model):
        rules = [update_rule(spec.name, each.optimizer, decays=spec.decay) for each in (config, same)]
        assert rules[0] == rules[1]


@pytest.mark.parametrize(
    "more",
    [
        {"model__bias": "all", "model__norm": "layernorm", "model__qk_norm": True, "model__tie_embeddings": False},
        {"model__sinks": True},
        {"model__layers": ["dense*1", "moe*1"], "model__moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}},
    ],
)
def test_every_parameter_has_the_rate_of_its_kind(more: dict[str, Any]) -> None:
    config = config_of(64, optimizer__weight_decay=0.1, **more)
    made = with_fields(config, mup_fields(config, 16, 4))
    assert problems(made) == []
    assert made.model.attention_scale == pytest.approx(2 / 16)
    for spec in model_specs(config.model):
        if not spec.is_trained:
            continue
        rule = update_rule(spec.name, made.optimizer, decays=spec.decay)
        is_end = spec.name in ("embedding.word.weight", "head.weight")
        assert rule.lr_factor == pytest.approx(1.0 if not spec.decay else 0.5 if is_end else 0.25), spec.name
        assert rule.lr_factor * rule.weight_decay == pytest.approx(0.1 if spec.decay else 0.0), spec.name


def test_what_the_rules_do_not_cover_is_refused_at_once() -> None:
    groups = [{"match": "head*", "lr_factor": 0.5}]
    config = config_of(64, model__position="learned", optimizer__name="sgd", optimizer__groups=groups)
    with pytest.raises(ConfigError) as caught:
        mup_fields(config, 0)
    assert len(caught.value.problems) == 4
