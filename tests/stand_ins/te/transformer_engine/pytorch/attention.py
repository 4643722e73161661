"""`DotProductAttention` of tokens first, computed by torch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class DotProductAttention(nn.Module):
    """Causal attention of [s, b, heads, d], with a window where one is given."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert (attention_dropout, qkv_format, attn_mask_type, tp_group, cp_group) == (
            0.0,
            "sbhd",
            "causal",
            None,
            None,
        )
        assert window_size is None or window_size[1] == 0
        self.heads, self.kv_heads, self.size = num_attention_heads, num_gqa_groups, kv_channels
        self.window, self.scale = window_size, softmax_scale

    def forward(self, query_layer: torch.Tensor, key_layer: torch.Tensor, value_layer: torch.Tensor) -> torch.Tensor:
        s, b = query_layer.shape[:2]
        assert query_layer.shape == (s, b, self.heads, self.size)
        assert key_layer.shape == value_layer.shape == (s, b, self.kv_heads, self.size)
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query_layer, key_layer, value_layer))
        distance = torch.arange(s)[:, None] - torch.arange(s)
        seen = (distance >= 0) & (distance <= (s if self.window is None else self.window[0]))
        out = F.scaled_dot_product_attention(q, k, v, seen, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)
