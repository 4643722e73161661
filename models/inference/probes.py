"""Outputs of each part of a model in a forward pass, reduced to few numbers for a comparison of two layouts.

A site is `embedding`, `layers.N.attention`, `layers.N.mlp` (the branches), `layers.N` (the residual stream after it),
`token_losses` or `loss` (the sum over a microbatch). Of an output [s, b, h] each token keeps one number, its product with a
fixed random vector: enough to see any difference, and small enough to write down.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from engine.numerics.hashing import key64
from models.gpt.chunk import Block, GPTChunk

SITES_PER_LAYER = 3
ENDS = ("token_losses", "loss")
TOKEN_LOSSES, LOSS = ENDS


def site_order(name: str, num_layers: int) -> int:
    """Return the sort key of a site: its place along the model."""
    if name == "embedding":
        return 0
    if name in ENDS:
        return 1 + SITES_PER_LAYER * num_layers + ENDS.index(name)
    _, layer, *branch = name.split(".")
    return 1 + SITES_PER_LAYER * int(layer) + {"attention": 0, "mlp": 1, "": 2}[branch[0] if branch else ""]


class Probes:
    """Outputs that were recorded during `open`: {site: {samples: values}}.

    Values are float64 [s] (or [s/t], this rank's part of the sequence) of one sample, keyed by its id; of the loss a
    scalar, keyed by the ids of the microbatch.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = [cast(GPTChunk, chunk) for chunk in chunks]
        self._samples: list[int] | None = None
        self.values: dict[str, dict[str, torch.Tensor]] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record the chunks' forwards; a forward that is recomputed in a backward is not recorded again."""
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
        if output.dim() == 0 and self._samples is not None:
            samples = ",".join(map(str, self._samples))
            self.values.setdefault(LOSS, {})[samples] = output.detach().cpu().double().view(1)
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
    for block in chunk.blocks:
        name = cast(Block, block).name
        yield f"{name}.attention", cast(Block, block).attention
        yield f"{name}.mlp", cast(Block, block).mlp
        yield name, block
    if chunk.losses is not None:
        yield TOKEN_LOSSES, chunk.losses


def _direction(site: str, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(key64(f"probe of {site}") & (2**63 - 1))
    return torch.randn(width, generator=generator, dtype=torch.float64)
