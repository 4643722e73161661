"""Context parallelism by hand: `plain_gpt.py` on pieces r and 2 c - 1 - r of 2 c of each sample, on rank r of c, keys gathered."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.plain_gpt import PlainLoop
from triaxis.engine.config.tree import Config


class Gather(torch.autograd.Function):
    """Each rank's tensor on all ranks; the backward sums their gradients."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dist.all_gather(parts := [torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        mine = torch.empty_like(all_grads := torch.stack(grads))
        dist.all_to_all_single(mine, all_grads)
        return mine.sum(0)


class PlainContextParallel(PlainLoop):
    """A rank of the default process group, which holds every parameter whole; it is given whole samples."""

    def __init__(self, config: Config, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__(config, weights, self.attend)
        c, r, s = dist.get_world_size(), dist.get_rank(), config.model.seq_length
        pieces = [torch.arange(s).chunk(2 * c)[piece] for piece in (r, 2 * c - 1 - r)]
        self.places = torch.cat(pieces)
        # A piece sees the keys up to its own end.
        self.masks = [piece[:, None] >= torch.arange(int(piece[-1]) + 1) for piece in pieces]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend from q [b, heads, s/c, d] to the keys of all ranks; k, v [b, kv_heads, s/c, d]."""
        heads, tails = zip(*(part.chunk(2, dim=3) for part in Gather.apply(torch.stack((k, v)))), strict=True)
        both, mixed = torch.cat((*heads, *reversed(tails)), dim=3), []
        for part, mask in zip(q.chunk(2, dim=2), self.masks, strict=True):
            seen = both[:, :, :, : mask.shape[1]]
            mixed.append(F.scaled_dot_product_attention(part, *seen, mask, enable_gqa=q.shape[1] != k.shape[1]))
        return torch.cat(mixed, dim=2)

    def step(self, microbatches: Sequence[Any], lr: float) -> tuple[float, float]:
        """Make an optimizer step on whole samples; returns the loss per token and the gradient norm before clipping."""
        fields = ("tokens", "labels", "position_ids")
        cut = [replace(one, **{name: getattr(one, name)[:, self.places] for name in fields}) for one in microbatches]
        loss = torch.tensor([self.forward_backward(cut)])
        grads = [master.grad for master in self.weights.masters if master.grad is not None]
        dist.all_reduce(flat := torch.cat([each.flatten() for each in (*grads, loss)]))
        *means, loss = flat.div_(dist.get_world_size()).split([each.numel() for each in (*grads, loss)])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view_as(grad))
        return float(loss), self.update(lr)
