"""Triaxis: pretraining of GPT models in tensor, pipeline and data parallel.

    triaxis.load_config("gpt_tiny", ["train.steps=20"])     a configuration, with every rule checked
    triaxis.open_checkpoint("runs/gpt_tiny")["embedding.word.weight"]     a whole tensor, whatever layout saved it
    triaxis.train("gpt_tiny", ["train.steps=20"]).losses     what `triaxis train` does, on torchrun's ranks or in this process
    triaxis.Extension, triaxis.ParamSpec, triaxis.Init     parts of a model of your own (docs/extending.md)
    triaxis.ModelConfig, triaxis.OwnCosts     what its functions are given, and what its costs are returned as
    triaxis.__version__

Commands do the rest (`triaxis --help`); docs/training.md, "In Python", describes these names. Each is imported when it is first
used, so that a command that needs no torch starts without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triaxis.engine.checkpoint.inspect.opened import open_checkpoint
    from triaxis.engine.config.load import load_config
    from triaxis.engine.config.schema.extension_parts import Extension, OwnCosts
    from triaxis.engine.config.schema.model import ModelConfig
    from triaxis.engine.layout.shard_spec import Init, ParamSpec
    from triaxis.launch.train_run import train

    __version__: str

__all__ = [
    "Extension",
    "Init",
    "ModelConfig",
    "OwnCosts",
    "ParamSpec",
    "__version__",
    "load_config",
    "open_checkpoint",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from triaxis.engine.program import version

        return version()
    if name == "load_config":
        from triaxis.engine.config.load import load_config

        return load_config
    if name == "open_checkpoint":
        from triaxis.engine.checkpoint.inspect.opened import open_checkpoint

        return open_checkpoint
    if name in ("Extension", "OwnCosts"):
        from triaxis.engine.config.schema import extension_parts

        return getattr(extension_parts, name)
    if name == "ModelConfig":
        from triaxis.engine.config.schema.model import ModelConfig

        return ModelConfig
    if name in ("Init", "ParamSpec"):
        from triaxis.engine.layout import shard_spec

        return getattr(shard_spec, name)
    if name == "train":
        from triaxis.launch.train_run import train

        return train
    raise AttributeError(f"module 'triaxis' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
