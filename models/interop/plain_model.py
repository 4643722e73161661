"""What a model has beyond a plain one, which other engines' files and formats may lack."""

from collections.abc import Collection

from triaxis.engine.config.schema.model import ModelConfig

BEYOND_PLAIN = (
    "mla",
    "window",
    "sinks",
    "rotary_share",
    "rope_scaling",
    "attention_scale",
    "attention_softcap",
    "norm_placement",
    "parallel_block",
    "embedding_multiplier",
    "residual_multiplier",
    "logit_divisor",
    "logit_softcap",
    "layers",
    "layer_kinds",
    "moe",
    "mtp",
)
"""`model` fields that plain models in other engines lack: there, a non-default value cannot be expressed."""


def beyond_plain(model: ModelConfig, known: Collection[str] = ()) -> list[str]:
    """List `field = value` for each BEYOND_PLAIN field with a non-default value, except those in `known`."""
    fields = type(model).model_fields
    return [
        f"model.{name} = {getattr(model, name)}"
        for name in BEYOND_PLAIN
        if name not in known and getattr(model, name) != fields[name].get_default(call_default_factory=True)
    ]
