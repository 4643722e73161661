"""List the corpora that a run blends, each with its share of the samples.

data:
  train:
    - {path: data/web, weight: 0.7, name: web}
    - {path: data/code, weight: 0.3}
  valid: data/held_out                              a path alone: the whole blend
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from triaxis.engine.config.values.counts import no_bool
from triaxis.engine.config.values.places import LocalPath, Name


class Source(BaseModel):
    """A corpus in a blend. A bare path is accepted too: the other fields then have their defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)

    path: LocalPath = Field(description="of a Megatron .bin/.idx pair, without the ending")
    weight: Annotated[float, BeforeValidator(no_bool)] = Field(
        1.0, gt=0, description="share of the samples, before division by the sum"
    )
    name: Name | None = Field(None, description="for people; null: the last part of the path")

    @model_validator(mode="before")
    @classmethod
    def _of_path(cls, value: Any) -> Any:
        match value:
            case [float() | int() as weight, str() as path]:
                raise ValueError(f"a corpus has names for its values: write {{path: {path}, weight: {weight}}}")
        return {"path": value} if isinstance(value, str | int) and not isinstance(value, bool) else value

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value != type(self).model_fields[key].default}

    @property
    def title(self) -> str:
        """The corpus's name in logs and tables: `name`, or the last part of the path."""
        return self.name or Path(self.path).name


def _listed(value: Any) -> Any:
    """Wrap a single source in a list."""
    return [value] if isinstance(value, str | int | Mapping | Source) else value


Sources = Annotated[list[Source], BeforeValidator(_listed)]
