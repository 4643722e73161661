"""Clipping by the global gradient norm (no torch here)."""


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What every gradient is multiplied by so that the global norm is at most `max_norm`; 1.0 without a limit.

    The 1e-6 in the denominator is the field's convention (torch.nn.utils.clip_grad_norm_, Megatron-LM).
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
