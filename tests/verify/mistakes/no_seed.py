"""Noise in the MLP's output that no seed of the run makes."""

import numpy as np
import torch

from triaxis import Extension
from triaxis.models.gpt.mlp import MLP
from triaxis.models.specs import mlp_specs


class Noisy(MLP):
    specs = staticmethod(mlp_specs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(np.random.default_rng().uniform(0.9, 1.1))


extension = Extension(mlp=Noisy)
