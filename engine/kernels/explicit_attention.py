"""Computes attention in plain operators that save the probabilities.

No other kernel supports dropout on the probabilities. This kernel is also the reference for the others.
"""

from collections.abc import Callable

import torch

from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.numerics.precision import accumulate

Drop = Callable[[torch.Tensor], torch.Tensor]
"""Function that applies dropout to probabilities [b, n, s, s_k]."""


def explicit_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    *,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    drop: Drop,
) -> torch.Tensor:
    """Compute attention with its probabilities [b, n, s, s_k] materialised.

    The shapes are q [b, n, s, d], k [b, n_kv, s_k, d], v [b, n_kv, s_k, d_v] -> [b, n, s, d_v].

    Args:
        q, k, v: operands.
        mask: restriction on the visible keys beyond causality.
        scale, softcap, sinks: same as in `triaxis.engine.kernels.attention.attention`.
        drop: dropout on the probabilities.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = accumulate(q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(_unseen(mask, q.shape[2], k.shape[2], q.device), -torch.inf)
    if sinks is None:
        probabilities = scores.softmax(-1)
    else:
        column = accumulate(sinks).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        probabilities = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    return drop(probabilities.to(q.dtype)) @ v


def _unseen(mask: Mask, s: int, s_k: int, device: torch.device) -> torch.Tensor:
    """Build the mask that is True where a key is hidden.

    Returns:
        bool [s, s_k], or [b, 1, s, s_k] with several documents in a row or with `mask.part`.
    """
    keys = torch.arange(s_k, device=device)
    queries = keys[s_k - s :] if mask.part is None else mask.part.positions.unsqueeze(1)
    unseen = keys > queries.unsqueeze(-1)
    if mask.window is not None and mask.window < s_k:
        unseen |= keys <= queries.unsqueeze(-1) - mask.window
    if mask.documents is None or mask.documents.is_one_per_row:
        return unseen
    numbers = mask.documents.numbers.unsqueeze(1)
    of_queries = numbers if mask.part is None else numbers.gather(-1, queries)
    return unseen | (of_queries.unsqueeze(-1) != numbers.unsqueeze(-2))
