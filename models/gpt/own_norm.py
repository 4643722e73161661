"""A norm of an extension, called as ours are."""

import torch
from torch import nn


class OwnNorm(nn.Module):
    """A norm over the last dim, to whose input `factor` times a branch may be added first.

    Args:
        norm: x [.., h] -> [.., h].
        factor: of the branch.
    """

    def __init__(self, norm: nn.Module, factor: float) -> None:
        super().__init__()
        self.norm, self.factor = norm, factor

    def forward(
        self, x: torch.Tensor, branch: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x [.., h], or y = x + factor branch and the norm of y."""
        if branch is None:
            normalised: torch.Tensor = self.norm(x)
            return normalised
        y = torch.add(x, branch, alpha=self.factor)
        return y, self.norm(y)
