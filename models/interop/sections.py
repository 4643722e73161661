"""Our sections, made of what other software wrote."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from triaxis.engine.config.model import ModelConfig
from triaxis.engine.errors import ConfigError, shown


def checked_model(model: Mapping[str, Any], problems: Sequence[str], source: str) -> tuple[dict[str, Any], ModelConfig]:
    """Return the fields of a model that are given, and the section that they make.

    Args:
        model: our fields; None: not given.
        problems: what was found wrong before.
        source: name of the file in the error.

    Raises:
        ConfigError: all problems, or every field that has no legal value.
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
