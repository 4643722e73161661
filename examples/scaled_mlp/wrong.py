"""The scaled MLP with one word wrong: no rank adds what the others know of the scale's gradient."""

from collections.abc import Iterator
from dataclasses import replace

from scaled_mlp import ScaledMLP

from triaxis import Extension, ModelConfig, ParamSpec


class WrongMLP(ScaledMLP):
    """Says that every rank has the whole gradient, where each has that of its part of the sequence."""

    @staticmethod
    def specs(model: ModelConfig, layer: int) -> Iterator[ParamSpec]:
        """List the same parameters, the scale as one whose gradient is whole."""
        for spec in ScaledMLP.specs(model, layer):
            yield replace(spec, grad_is_partial="never") if spec.name == "scale" else spec


extension = Extension(mlp=WrongMLP)
