"""Runs cuDNN's attention on a GPU in bf16 and fp16, for parts of a row (context parallelism)."""

import torch

from triaxis.engine.kernels.masked_attention import FirstKeyAligned, Tensors3


class Cudnn(FirstKeyAligned):
    """cuDNN's attention, without windows and documents.

    By published rates of an H100, a layer of 128k tokens takes 70 ms, and 112 with `varlen`.
    """

    def call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, is_causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(q, k, v, mask, True, 0.0, is_causal, False), scale=self.scale
        )
        # The log-sum-exp has a dimension of length 1 more.
        return found[0], found[1].view(q.shape[:3])

    def call_backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        is_causal: bool,
    ) -> Tensors3:
        # In place of dropout's random state, which is not read.
        state = torch.empty((), dtype=torch.int64, device=q.device)
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(grad, q, k, v, out, lse.contiguous().unsqueeze(-1), state, state),
            *(mask, None, None, q.shape[2], k.shape[2], 0.0, is_causal),
            scale=self.scale,
        )
