"""`Extension` and `OwnCosts`, for extensions that import them from here. New ones import them from `triaxis`."""

from triaxis.engine.config.schema.extension_parts import Extension, OwnCosts

__all__ = ["Extension", "OwnCosts"]
