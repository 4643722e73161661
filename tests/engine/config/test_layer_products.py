"""The list of a layer's products has the sides of the weights that the model is built from."""

import re
from collections import Counter

import pytest

from triaxis.engine.config.load import load_config
from triaxis.engine.config.quantities.layer_products import layer_products
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.layout.shard_spec import localize
from triaxis.engine.program import ROOT
from triaxis.models.specs import layer_specs

WEIGHTS = {
    "mtp.projection": "mtp.projection",
    "attention.qkv": "attention.(q|kv)",
    "attention.down": "attention.(q|kv)_a",
    "attention.q_up": "attention.(q|q_b)",
    "attention.kv_up": "attention.kv_b",
    "attention.proj": "attention.proj",
    "mlp.up": "mlp.(up|gate_up)",
    "mlp.down": "mlp.down",
    "mlp.shared.up": "mlp.shared.(up|gate_up)",
    "mlp.shared.down": "mlp.shared.down",
}
"""Each product's weights in `models/specs.py`."""

LATENTS = ("attention.down", "attention.q_up", "attention.kv_up")

MODELS = {path.stem: load_config(path).model for path in sorted((ROOT / "configs").glob("*.yaml"))}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("t", [1, 2, 4])
def test_products_multiply_the_weights_of_the_model(name: str, t: int) -> None:
    model: ModelConfig = MODELS[name]
    for layer in {kind: layer for layer, kind in enumerate(model.kinds)}.values():
        records = [
            localize(spec, tp=t, tp_index=0, sequence_parallel=False)
            for spec in layer_specs(model, layer)
            if len(spec.shape) > 1 and spec.decay and not spec.name.endswith(("_norm.weight", "router.weight"))
        ]
        other_attention = ("attention.qkv",) if model.mla is not None else LATENTS
        listed = Counter[str]()
        for record in records:
            short = record.name.removeprefix(f"layers.{layer}.").removesuffix(".weight")
            found = [name for name, weights in WEIGHTS.items() if re.fullmatch(weights, short)]
            for name in set(found).difference(other_attention):
                listed[name] += record.numel
        products = layer_products(model, model.layer_kind(layer), t)
        assert {product.name: product.weights for product in products} == dict(listed)
        # The last product of each branch gives back what enters it.
        assert all(product.n == model.hidden_size for product in products if product.kind == "row")
