"""Refuse to export models with user-written parts, which other software lacks."""

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.errors import ConfigError


def refuse_own_parts(model: ModelConfig, other: str) -> None:
    """Check that a model has only built-in parts.

    An extension's loss is allowed, because an export does not contain the loss.

    Args:
        other: name of the software that would read the export.

    Raises:
        ConfigError: an extension provides a part of the model.
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
