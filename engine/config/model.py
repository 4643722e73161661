"""`ModelConfig`, for extensions that import it from here. New ones import it from `triaxis`."""

from triaxis.engine.config.schema.model import ModelConfig

__all__ = ["ModelConfig"]
