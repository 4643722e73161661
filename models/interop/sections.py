"""Validate a `model` section built from other software's settings."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from triaxis.engine.config.model import ModelConfig
from triaxis.engine.errors import ConfigError, shown


def checked_model(model: Mapping[str, Any], problems: Sequence[str], source: str) -> tuple[dict[str, Any], ModelConfig]:
    """Validate `model` fields.

    Returns the fields that are given, and the section built from them.

    Args:
        model: fields under our names; a field that is None counts as not given.
        problems: problems that the caller found while converting.
        source: file name for the error message.

    Raises:
        ConfigError: `problems` is not empty, or fields have illegal values.
    """
    if problems:
        raise ConfigError(problems, source)
    section = {name: value for name, value in model.items() if value is not None}
    try:
        return section, ModelConfig.model_validate(section)
    except ValidationError as error:
        wrong = [
            f"model.{'.'.join(map(str, detail['loc']))} = {shown(detail['input'])}: {detail['msg']}."
            for detail in error.errors()
        ]
        raise ConfigError(wrong, source) from error
