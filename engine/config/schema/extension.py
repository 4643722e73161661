"""The `model.extension` section: where a user's module is.

    model:
      extension: scaled_mlp.py       a file, a package's folder, or a name that Python finds; paths start at the config's folder

The sources' digest is a separate field in every copy of the configuration, so ranks compare it. A configuration whose digest does
not match the sources is refused. A resume with another digest needs the user's consent (`checkpoint.accept`).
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, model_validator

from triaxis.engine.config.schema.extension_parts import NO_COSTS, Extension, OwnCosts
from triaxis.engine.config.schema.section import LAYOUT, MEANT, OnResume, Section
from triaxis.engine.config.values.places import LocalPath, local_path
from triaxis.engine.storage.user_module import UserModuleError, available_source, find_sources, is_path, load

NAME = "extension"
"""Name that a user's module assigns its `Extension` to."""


class ExtensionConfig(Section):
    """A user's module that replaces parts of the model."""

    on_resume = MEANT

    source: Annotated[LocalPath, LAYOUT] = Field(
        min_length=1, description="Python file, folder of a package, or name of a module with an `Extension`"
    )
    digest: str = Field(
        "", description="SHA-256 of the module's .py files, filled in when it is read; other sources are refused"
    )
    moments: Annotated[tuple[str, ...], OnResume("never")] = Field(
        (), description="state of its update rule beside the master, filled in when it is read"
    )
    _costs: OwnCosts = PrivateAttr(NO_COSTS)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: object) -> object:
        """Accept a source alone in place of the section, and fill in the digest and moments if the sources can be read."""
        tree = {"source": given} if isinstance(given, str) else given
        if not isinstance(tree, Mapping) or tree.get("digest") or not isinstance(tree.get("source"), str):
            return tree
        try:
            tree = {**tree, "digest": find_sources(tree["source"]).digest()}
            rule = given_by(tree["source"], tree["digest"]).update
            return {**tree, "moments": () if rule is None else rule.moments}
        except UserModuleError:
            return tree  # `extension_problem` reports why

    @property
    def lines(self) -> list[str]:
        """One line that names the provided parts, and a second with their measured costs or with why these are unknown.

        The second line is left out until `with_costs` has attached costs, and if the parts cost as much as built-in ones.
        """
        return [str(self), *([str(self._costs)] if self._costs != NO_COSTS else [])]

    @property
    def costs(self) -> OwnCosts:
        """Measured costs; `NO_COSTS` if nothing was measured."""
        return self._costs

    def with_costs(self, costs: OwnCosts) -> "ExtensionConfig":
        """Copy the section with measured costs attached, which are never written to a file."""
        measured = self.model_copy()
        measured._costs = costs
        return measured

    def __str__(self) -> str:
        given = ", ".join(f"{part} {_name(each)}" for part, each in self.read().parts().items())
        return f"{self.source} ({self.digest[:8]}): {given}"

    def read(self) -> Extension:
        """Load the module's extension.

        Raises:
            UserModuleError: see `given_by`.
        """
        return given_by(self.source, self.digest or find_sources(self.source).digest())


def given_by(source: str, digest: str) -> Extension:
    """Load a module's extension.

    Raises:
        UserModuleError: it cannot be found, read or run, its sources do not match `digest`, or it provides no part.
    """
    given = getattr(load(source, digest), NAME, None)
    if not isinstance(given, Extension):
        raise UserModuleError(f"it assigns no Extension to the name `{NAME}`: {NAME} = Extension(mlp=ScaledMLP), say")
    if not given.parts():
        raise UserModuleError(f"its Extension gives no part, so it would have no effect. It may give {_names()}")
    return given


def _name(given: Any) -> str:
    """Format the name of a provided part, or the names of several parts."""
    if isinstance(given, Sequence):
        return " ".join(getattr(each, "__qualname__", type(each).__name__) for each in given)
    return " ".join(given) if isinstance(given, Mapping) else str(given.__name__)


def _names() -> str:
    return ", ".join(one.name for one in fields(Extension))


def placed(section: object, folder: Path) -> object:
    """Make the source path in an `extension` section absolute; a relative path starts at `folder`.

    If the sources no longer have the section's digest, the path becomes that of the copy that a run keeps in `folder`, if any.
    """
    if isinstance(section, dict):
        source, digest = placed(section.get("source"), folder), section.get("digest")
        if isinstance(source, str) and isinstance(digest, str):
            source = available_source(source, digest, folder)
        return {**section, "source": source}
    if isinstance(section, str) and is_path(section):
        with suppress(ValueError):  # raised for a path that the field refuses
            return os.path.normpath(folder / local_path(section))
    return section
