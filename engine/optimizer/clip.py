"""Clipping by the global gradient norm."""

import torch


def clip_factor(norm: torch.Tensor, max_norm: float | None) -> torch.Tensor | None:
    """Return the factor that limits the global gradient norm to `max_norm`; None without a limit.

    `norm` and the factor are scalars on the device. The 1e-6 in the denominator is the field's convention
    (torch.nn.utils.clip_grad_norm_, Megatron-LM).
    """
    return None if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
