"""Record each model part's outputs in a forward pass, to compare two layouts.

A site is `embedding`, `layers.N.attention` or `layers.N.mlp` (the branches), `layers.N` (the residual stream after the layer),
`token_losses` or `loss` (the sum over a microbatch). A multi-token prediction layer also has `layers.N.embedding` and
`layers.N.losses`. An output [s, b, h] is reduced to one number per token: its product with a fixed random vector.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from triaxis.engine.numerics.hashing import key64
from triaxis.models.gpt.chunk import GPTChunk
from triaxis.models.gpt.mtp import TokenAhead

TOKEN_LOSSES, LOSS = "token_losses", "loss"
OF_LAYER = ("embedding", "attention", "mlp", "", "losses")
"""Sites in a layer, in forward order; only multi-token prediction layers have the first and the last."""


def site_order(name: str, num_layers: int) -> int:
    """Sort key for sites (recorded outputs) in forward order. `num_layers` excludes multi-token prediction layers."""
    if name == "embedding":
        return 0
    if name == LOSS:
        return sys.maxsize
    # Multi-token prediction layers come after the next-token losses.
    losses = 1 + len(OF_LAYER) * num_layers
    if name == TOKEN_LOSSES:
        return losses
    _, layer, *branch = name.split(".")
    number = int(layer)
    return 1 + len(OF_LAYER) * number + OF_LAYER.index(branch[0] if branch else "") + (number >= num_layers)


class Probes:
    """Recorder of the chunks' outputs while `open` is active.

    `values` maps site (output, such as `layers.3.mlp`) -> sample id -> float64 [s], or [s/t] if this rank has a part of the
    sequence. The loss is [1], and its key joins the ids of all the microbatch's samples with commas.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = [cast(GPTChunk, chunk) for chunk in chunks]
        self._samples: list[int] | None = None
        self.values: dict[str, dict[str, torch.Tensor]] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record the chunks' forwards, except those that the backward recomputes."""
        hooks = []
        for chunk in self._chunks:
            hooks.append(chunk.register_forward_pre_hook(self._begin))
            for site, module in _sites(chunk):
                hooks.append(module.register_forward_hook(self._at(site)))
            hooks.append(chunk.register_forward_hook(self._end))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, chunk: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._samples = inputs[1].sample_ids

    def _end(self, chunk: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        # The loss is a scalar, or with multi-token prediction a vector's first element; hidden states are [s, b, h].
        if output.dim() < 3 and self._samples is not None:
            samples = ",".join(map(str, self._samples))
            self.values.setdefault(LOSS, {})[samples] = output.detach().view(-1)[:1].cpu().double()
        self._samples = None

    def _at(self, site: str) -> Any:
        def look(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            if self._samples is None:
                return
            kept = output.detach().cpu().double()
            if kept.dim() == 3:
                kept = kept @ _direction(site, output.shape[-1])
            for column, sample in enumerate(self._samples):
                self.values.setdefault(site, {})[str(sample)] = kept[:, column].clone()

        return look


def _sites(chunk: GPTChunk) -> Iterator[tuple[str, nn.Module]]:
    if chunk.embedding is not None:
        yield "embedding", chunk.embedding
    for layer, block in zip(chunk.stage.layers, chunk.blocks, strict=False):
        yield from _sites_of(f"layers.{layer}", block)
    if chunk.losses is not None:
        yield TOKEN_LOSSES, chunk.losses
    for layer, each in zip(
        chunk.stage.layers[chunk.stage.num_own :], () if chunk.ahead is None else chunk.ahead.layers, strict=True
    ):
        name, ahead = f"layers.{layer}", cast(TokenAhead, each)
        yield f"{name}.embedding", ahead.embedding
        yield from _sites_of(name, ahead.block)
        yield f"{name}.losses", ahead.losses


def _sites_of(name: str, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (site, module) for a layer's branches and the layer itself. An extension's block may lack branches."""
    parts = {part: getattr(block, part, None) for part in ("attention", "mlp")}
    yield from ((f"{name}.{part}", each) for part, each in parts.items() if isinstance(each, nn.Module))
    yield name, block


def _direction(site: str, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(key64(f"probe of {site}") & (2**63 - 1))
    return torch.randn(width, generator=generator, dtype=torch.float64)
