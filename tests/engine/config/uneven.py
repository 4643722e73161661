"""An MLP with 3 numbers that are cut over tp."""

from typing import Any

from triaxis import Extension, Init, ParamSpec


class Uneven:
    @staticmethod
    def specs(model: Any, layer: int) -> list[ParamSpec]:
        return [ParamSpec("three", (3,), Init("ones"), tp_dim=0)]


extension = Extension(mlp=Uneven)
