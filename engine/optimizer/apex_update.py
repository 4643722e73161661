"""Update all owned elements with apex's FusedAdam kernel, in one launch per update rule.

If gradients have the parameters' dtype, the kernel writes the masters and the parameters. Otherwise it writes only the masters, and
a second pass copies them to the parameters.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from triaxis.engine.config.quantities.update_settings import UpdateRule
from triaxis.engine.config.schema.training import OptimizerConfig
from triaxis.engine.config.values.optimizer_kinds import MASTER
from triaxis.engine.kernels.apex import Apex

if TYPE_CHECKING:  # the optimizer imports this
    from triaxis.engine.optimizer.pieces import Piece


def update_by_apex(
    apex: Apex,
    pieces: Sequence["Piece"],
    config: OptimizerConfig,
    lr: float,
    grad_scale: torch.Tensor,
    num_updates: torch.Tensor,
    skip: torch.Tensor,
) -> None:
    """Update masters, moments, average and parameters with gradients x `grad_scale`; nothing changes if `skip`.

    Args:
        pieces: pieces of this rank's trained buckets.
        lr: learning rate for the step.
        grad_scale, num_updates: scalars on the device; `num_updates` counts the updates before this one.
        skip: a bool on the device.
    """
    flag, step = skip.to(torch.int32).view(1), (num_updates + 1).to(torch.int32).view(1)
    by_rule: defaultdict[UpdateRule, list[tuple[Piece, slice]]] = defaultdict(list)
    for piece in pieces:
        for where, rule in piece.runs:
            by_rule[rule].append((piece, where))
    for rule, runs in by_rule.items():
        lists, followers = [], []
        for piece, where in runs:
            grads, (parameters, master, moments, _) = piece.grads[where], piece.state.part(where)
            if master is None or grads.dtype == parameters.dtype:
                lists.append([grads, parameters, *moments, *([] if master is None else [master])])
            else:
                lists.append([grads, master, *moments])
                followers.append((parameters, master))
        apex.update(
            list(zip(*lists, strict=True)),
            lr=torch.full_like(grad_scale, lr * rule.lr_factor).view(1),
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            decay=rule.weight_decay,
            step=step,
            scale=grad_scale.view(1),
            skip=flag,
        )
        for parameters, master in followers:
            parameters.copy_(master)
    if config.ema is not None:
        for piece in pieces:
            piece.state.update_average(piece.state.read(MASTER), config.ema.decay, skip)
