"""Carry learning rates over between model widths, by maximal update parametrization.

Source: 2203.03466 (muP). A narrow base model trains well with the initial standard deviation `std` and the learning rate `lr`. A
model m = hidden_size / base_hidden_size times as wide needs these values with Adam (table 8 of the paper):

                      initial std    learning rate    factor in the forward
    word embedding    std            lr               1
    hidden matrix     std / sqrt(m)  lr / m           1
    head              std            lr               1 / m
    vectors           unchanged      lr               1

Attention's logits are q . k sqrt(base_head_dim) / head_dim.

Here all matrices of a model share one initial std, so embedding and head start with std / sqrt(m) too. To make up for it, their
learning rate is lr / sqrt(m) and their outputs are multiplied by sqrt(m). Adam then trains the same model as with the table's
values (section 2 of the paper). So the embedding's factor in the forward is sqrt(m). The head's is the table's 1 / m times sqrt(m),
which is 1 / sqrt(m), whether it is tied or not.

AdamW multiplies weight decay by the learning rate. Each group's decay grows as its learning rate falls, so that decay x learning
rate equals the base model's (2309.14322). Adam's eps does not change. It should be small compared with the gradients.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from triaxis.engine.config.quantities.update_settings import group_of
from triaxis.engine.config.schema.groups import GroupFields
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.shard_spec import ParamSpec
from triaxis.models.specs import HEAD, WORD_EMBEDDING, model_specs

ENDS = (WORD_EMBEDDING, HEAD)
"""Matrices with the vocabulary on one side."""


def mup_fields(config: Config, base_hidden_size: int, base_head_dim: int | None = None) -> dict[str, Any]:
    """Compute config fields with which a model trains like a narrower base model.

    The keys are dotted names.

    Args:
        config: config of the model to train; lr, init_std and weight_decay have the base model's values.
        base_hidden_size: hidden size of the base model.
        base_head_dim: head size of the base model; None: this model's head size, so attention's scale stays 1 / sqrt(head_dim).

    Raises:
        ConfigError: the rules do not cover some settings of the config.
    """
    if found := list(_problems(config, base_hidden_size)):
        raise ConfigError(found)
    model, optimizer = config.model, config.optimizer
    width = model.hidden_size / base_hidden_size
    root = math.sqrt(width)
    trained = [spec for spec in model_specs(model) if spec.is_trained]
    fields: dict[str, Any] = {
        "model.init_std": model.init_std / root,
        "model.embedding_multiplier": model.embedding_multiplier * root,
        "model.logit_divisor": model.logit_divisor * root,
        "optimizer.groups": _groups(trained, width, optimizer.weight_decay),
    }
    if base_head_dim is not None:
        fields["model.attention_scale"] = math.sqrt(base_head_dim) / model.head_size
    return fields


def _problems(config: Config, base_hidden_size: int) -> Iterator[str]:
    model, optimizer = config.model, config.optimizer
    if base_hidden_size < 1:
        yield f"--base-hidden-size {base_hidden_size}: must be at least 1; it is the width of a model."
    if optimizer.name != "adamw":
        yield f"optimizer.name = {optimizer.name}: the rules are those of Adam; those of SGD have other rates. Set adamw."
    if optimizer.groups:
        yield (
            "optimizer.groups is given: muP is groups of parameters too, and the first match wins. Leave them out here, and put "
            "them in front of those that are printed, with factors of both."
        )
    if model.position_kind.has_table:
        yield (
            "model.position = learned: the table of positions is added to the embedding behind its factor, and would start too "
            "small. Set rope or none."
        )
    if model.attention_scale is not None:
        yield "model.attention_scale is given, and muP sets it. Leave it out."


def _groups(specs: Sequence[ParamSpec], width: float, weight_decay: float) -> list[GroupFields]:
    """Build `optimizer.groups` for a model m = `width` times as wide as its base.

    Vectors keep the learning rate lr. Matrices in ENDS get lr / sqrt(m), all others lr / m. A group's weight decay grows as its
    learning rate falls. Groups without parameters are left out.
    """
    root = math.sqrt(width)
    vectors = dict.fromkeys(_pattern(spec.name) for spec in specs if not spec.decay)
    made: list[GroupFields] = [{"match": pattern, "lr_factor": 1.0} for pattern in vectors]
    made += [{"match": name, "lr_factor": 1 / root, "weight_decay": weight_decay * root} for name in ENDS]
    made.append({"match": "layers.*", "lr_factor": 1 / width, "weight_decay": weight_decay * width})
    numbers = {spec.name: group_of(spec.name, made) for spec in specs}
    for spec in specs:
        number = numbers[spec.name]
        expected = 1.0 if not spec.decay else 1 / root if spec.name in ENDS else 1 / width
        assert number is not None and made[number]["lr_factor"] == expected, (
            f"{spec.name} has the rate of another group"
        )
    return [group for number, group in enumerate(made) if number in numbers.values()]


def _pattern(vector: str) -> str:
    """Build a name pattern for vector parameters with this name's ending; it matches no matrix."""
    last = vector.rpartition(".")[2]
    return "*norm.weight" if last == "weight" else f"*.{last}"
