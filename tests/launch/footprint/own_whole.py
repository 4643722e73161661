"""An extension with the MLP that every rank has whole."""

from tests.launch.footprint.own_parts import Whole
from triaxis import Extension

extension = Extension(mlp=Whole)
