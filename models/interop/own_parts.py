"""The refusal of models with parts of their own: no other software has their code."""

from triaxis.engine.config.model import ModelConfig
from triaxis.engine.errors import ConfigError


def refuse_own_parts(model: ModelConfig, other: str) -> None:
    """Check that a model computes what our own parts do. A loss of an extension is no part of it.

    Args:
        model: to be exported.
        other: the software that would read it.

    Raises:
        ConfigError: an extension gives a part.
    """
    if model.extension is None or not (given := model.own.with_parameters()):
        return
    parts = " and ".join(f"{each.__name__} in place of our {part}" for part, each in given.items())
    raise ConfigError(
        [
            f"model.extension = {model.extension.source} has {parts}: {other} has no code for it, and with its own it would "
            "compute another function from these weights. triaxis.open_checkpoint reads the tensors by name, for code of yours."
        ]
    )
