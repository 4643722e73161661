"""Puts values under a process that imports torch, and under the engine's compiler: what a process imports first if CARD_VALUES=1.

Without them, the first kernel of such a process ends it (c/card.c).
"""

import ctypes
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from tests.cuda_stub.build import LIBRARIES

AFTER = {"torch": "install", "triaxis.engine.kernels.fusion": "install_in_compiler"}
"""The function of `values.py` that is called after a module has been imported, with the module."""


class AfterImport(MetaPathFinder):
    """Finds modules as Python does, and calls the functions of AFTER."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in AFTER else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            getattr(importlib.import_module("tests.cuda_stub.values"), AFTER[name])(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


# The driver answers before torch is imported, and is then found by its name.
ctypes.CDLL(str(LIBRARIES / "libnvidia-ml.so.1"))
sys.meta_path.insert(0, AfterImport())
