"""The kernels of a run: the choices of the configuration's `kernels` section, tried on this device before anything is built.

    kernels.      what                                          choices                                   reference, in float64
    attention     scaled dot-product attention                  sdpa, flash, cudnn, efficient, explicit   explicit
    elementwise   norms, RoPE, SwiGLU, dropout, cross-entropy   eager, compiled                           plain torch
    weight_grad   dW += dY^T X                                  separate, fused                           separate
    optimizer     AdamW on the owned shards                     torch, compiled                           torch

A choice that does not run here is an error with what to do, never another kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import KernelsConfig
from engine.errors import ConfigError
from engine.kernels.attention import AttentionShape, chosen, require
from engine.kernels.fusion import Fusion, require_compiler
from engine.kernels.weight_grad import WeightGradKernel, require_weight_grad


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the modules of a model compute with.

    Attributes:
        attention: a name that `engine.kernels.attention.attention` takes, or `explicit`.
        fusion: how elementwise functions run.
        weight_grad: what adds a weight's gradient to its main grad.
    """

    attention: str
    fusion: Fusion
    weight_grad: WeightGradKernel


def resolve(config: KernelsConfig, shape: AttentionShape, main_grad_dtype: torch.dtype) -> Kernels:
    """The kernels of a run whose attention has this shape.

    Raises:
        ConfigError: some do not run here; all of them at once.
    """
    device = shape.device
    trials: list[Callable[[], None]] = [lambda: require(config.attention, shape)]
    if config.weight_grad != "separate":
        trials.append(lambda: require_weight_grad(config.weight_grad, shape.dtype, main_grad_dtype, device))
    if "compiled" in (config.elementwise, config.optimizer):
        trials.append(lambda: require_compiler(device))
    problems: list[str] = []
    for trial in trials:
        try:
            trial()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Kernels(config.attention, Fusion(config.elementwise), config.weight_grad)


def describe(config: KernelsConfig, shape: AttentionShape) -> str:
    """The choices in a line, with what torch takes where the choice is its own."""
    others = config.model_dump(exclude={"attention"})
    attention = f"sdpa, of which torch takes {chosen(shape)}" if config.attention == "sdpa" else config.attention
    return "; ".join(
        [f"attention: {attention}", *(f"{name.replace('_', ' ')}: {choice}" for name, choice in others.items())]
    )
