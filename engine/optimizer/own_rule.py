"""Look up an extension's update rule, and try it on a few elements before the first step."""

import torch

from triaxis.engine.config.schema.extension_parts import UpdatePart
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.numerics.precision import AGREEMENT_DTYPE


def own_rule(config: Config) -> type[UpdatePart] | None:
    """Return the extension's rule if the run asks for it, else None.

    Raises:
        ConfigError: `require_elementwise` rejects the rule.
    """
    rule = config.model.own.update if config.optimizer.name == "extension" else None
    if rule is not None:
        require_elementwise(rule, config.optimizer)
    return rule


def require_elementwise(rule: type[UpdatePart], config: OptimizerConfig) -> None:
    """Try an extension's rule on a row of elements.

    Raises:
        ConfigError: it does not return a new master and one new tensor for each moment, all with the elements' shape.
    """
    elements = torch.ones(6, dtype=AGREEMENT_DTYPE)
    moments = [torch.zeros_like(elements) for _ in rule.moments]
    one = elements[0].clone()
    new, new_moments = rule.elementwise(
        elements, moments, elements, rule.factors(config, config.lr * one, one), config, one
    )
    shapes = [tuple(tensor.shape) for tensor in (new, *new_moments)]
    if shapes != [(6,)] * (1 + len(moments)):
        raise ConfigError(
            [
                f"the update rule {rule.__qualname__} of model.extension gives {shapes} for 6 elements and {len(moments)} moments: "
                "it must give the new master and each new moment, of the same shape. A rank owns a flat part of the parameters, "
                "so a rule of whole matrices has none to read."
            ]
        )
