"""Dropout of hidden states, and the addition to the residual stream that follows it."""

import torch

from triaxis.engine.tensor_parallel.dropout import DropoutKeys, dropout
from triaxis.models.gpt.context import BuildContext


def hidden_dropout(
    module: torch.nn.Module,
    context: BuildContext,
    x: torch.Tensor,
    keys: DropoutKeys,
    site: str,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply dropout to [s(/t), b, h] while `module` trains, and add the residual; positions count through the whole [s, h].

    What is added to a residual is multiplied by `model.residual_multiplier`.
    """
    factor = context.model.residual_multiplier
    if not (module.training and context.model.hidden_dropout):
        return x if residual is None else torch.add(residual, x, alpha=factor)
    if residual is not None and factor != 1:
        x = x * factor
    h = context.model.hidden_size
    length = x.shape[0] * (context.region.axis.size if context.region.sequence_parallel else 1)
    rows = keys.rows(length, x.device)[context.region.shard_of_sequence(length)]
    positions = rows.unsqueeze(-1) * h + torch.arange(h, device=x.device)
    p, fusion = context.model.hidden_dropout, context.kernels.fusion
    return dropout(x, p, keys, site, positions, batch_dim=1, fusion=fusion, residual=residual)
