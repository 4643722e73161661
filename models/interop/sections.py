"""Validate sections that other software's settings or a checkpoint give."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.config.schema.section import Section
from triaxis.engine.errors import CheckpointError, ConfigError, shown

Recorded = TypeVar("Recorded", bound=Section)


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


def recorded_section(kind: type[Recorded], values: Any, folder: Path) -> Recorded:
    """Validate the section, or the whole configuration, that a checkpoint's manifest records; None counts as empty.

    Raises:
        CheckpointError: the values are illegal.
    """
    try:
        return kind.model_validate(values if values is not None else {})
    except ValidationError as error:
        first = error.errors()[0]
        what, way = (
            ("model", "") if kind is ModelConfig else ("configuration", ", or export only the weights: --weights-only")
        )
        raise CheckpointError(
            f"the manifest of {folder} has an invalid {what}: {'.'.join(map(str, first['loc']))}: {first['msg']}. Its tensors "
            f"could not be named. Write the checkpoint again{way}."
        ) from None
