"""Models of transformers whose norms and RoPE compute in float64, where transformers computes in fp32."""

from typing import Any

import pytest
import torch


class WideTorch:
    """torch, in which float and float32 are float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def wide_frequencies(config: Any) -> tuple[torch.Tensor, float]:
    """The frequencies [d / 2] of a configuration in float64 and the factor on cosines, by transformers' own functions."""
    from transformers import modeling_rope_utils

    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.rope_parameters["rope_theta"] ** -(torch.arange(0, d, 2, dtype=torch.float64) / d), 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_rope_utils, "torch", WideTorch())
        return modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


def wide(model: Any) -> Any:
    """transformers computes RMSNorm and the angles of RoPE in fp32 whatever the model's dtype is; here in float64."""

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))

    def rotary(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies, factor = module.frequencies_of_test
        angles = torch.cat((position_ids[..., None] * frequencies,) * 2, dim=-1)
        return angles.cos() * factor, angles.sin() * factor

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = lambda x, module=module: norm(module, x)
        elif kind.endswith("RotaryEmbedding"):
            module.frequencies_of_test = wide_frequencies(module.config)
            module.forward = lambda x, position_ids, module=module: rotary(module, x, position_ids)
    return model
