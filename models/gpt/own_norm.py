"""A wrapper that gives an extension's norm the built-in norms' call signature."""

import torch
from torch import nn


class OwnNorm(nn.Module):
    """A norm over the last dim that can first add a branch to its input.

    Args:
        norm: module x [.., h] -> [.., h].
        factor: multiplier on the branch.
    """

    def __init__(self, norm: nn.Module, factor: float) -> None:
        super().__init__()
        self.norm, self.factor = norm, factor

    def forward(
        self, x: torch.Tensor, branch: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalise x [.., h], after adding `branch` if given.

        Returns norm(x), or with `branch` y = x + factor * branch and norm(y).
        """
        if branch is None:
            normalised: torch.Tensor = self.norm(x)
            return normalised
        y = torch.add(x, branch, alpha=self.factor)
        return y, self.norm(y)
