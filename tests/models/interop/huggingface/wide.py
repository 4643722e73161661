"""Models of transformers whose norms and RoPE compute in float64, where transformers computes in fp32."""

import sys
from functools import partial
from typing import Any

import pytest
import torch


class WideTorch:
    """torch, in which float and float32 are float64."""

    float = float32 = torch.float64

    def arange(self, *args: Any, **options: Any) -> torch.Tensor:
        """Return the numbers; longrope calls their `float()`, not a name of torch."""
        numbers = torch.arange(*args, **options)
        numbers.float = numbers.double  # type: ignore[method-assign]
        return numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def wide_frequencies(config: Any, of_type: str | None, length: int) -> tuple[torch.Tensor, float]:
    """Return the frequencies [d / 2] of a configuration in float64 and the factor on cosines, by transformers' own functions.

    Args:
        of_type: of layers whose RoPE it is; None: it is that of all of them.
        length: tokens of the longest text, on which longrope depends.
    """
    from transformers import modeling_rope_utils

    rope = config.rope_parameters if of_type is None else config.rope_parameters[of_type]
    if rope["rope_type"] == "default":
        d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        d = int(d * rope.get("partial_rotary_factor", 1.0))
        return rope["rope_theta"] ** -(torch.arange(0, d, 2, dtype=torch.float64) / d), 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_rope_utils, "torch", WideTorch())
        return modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]](
            config, torch.device("cpu"), seq_len=length, layer_type=of_type
        )


def wide(model: Any) -> Any:
    """Return the model with RMSNorm, the angles of RoPE, the softmax of Gemma 2 and routers in float64.

    transformers computes them in fp32 whatever the model's dtype is.
    """
    # The grouped products of torch take no float64.
    model.set_experts_implementation("eager")
    forward = model.forward

    def with_wide_softmax(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: torch.softmax(x, dim))
            of_family = sys.modules[type(model).__module__]
            if hasattr(of_family, "apply_rotary_emb"):
                patch.setattr(of_family, "apply_rotary_emb", turned)
            return forward(*args, **kwargs)

    model.forward = with_wide_softmax

    def turned(q: torch.Tensor, k: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rotate pairs of neighbours, as DeepSeek-V2 does in complex fp32."""
        pairs = (torch.complex(each[..., 0::2], each[..., 1::2]) for each in (q, k))
        return tuple(torch.view_as_real(each * turns.unsqueeze(1)).flatten(3) for each in pairs)

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        # Gemma's norms store the gain less 1, and call their epsilon by another name.
        gain, eps = (
            (1.0 + module.weight, module.eps) if hasattr(module, "eps") else (module.weight, module.variance_epsilon)
        )
        return gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    def rotary(module: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        frequencies, factor = wide_frequencies(module.config, layer_type, int(position_ids.max()) + 1)
        if type(module).__name__.startswith("DeepseekV2"):
            angles = position_ids[..., None] * frequencies
            return torch.polar(torch.full_like(angles, factor), angles)
        angles = torch.cat((position_ids[..., None] * frequencies,) * 2, dim=-1)
        return angles.cos() * factor, angles.sin() * factor

    def route(forward: Any, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            patch.setattr(torch.Tensor, "type", lambda x, _: x.double())
            patch.setattr(torch.Tensor, "softmax", lambda x, dim, dtype: torch.softmax(x, dim))
            return forward(*args)

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = lambda x, module=module: norm(module, x)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = lambda *args, module=module, **kwargs: rotary(module, *args, **kwargs)
        elif kind.lower().endswith("topkrouter"):
            module.forward = partial(route, module.forward)
        elif kind.endswith("ScaledWordEmbedding"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    return model
