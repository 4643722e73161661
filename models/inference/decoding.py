"""A chunk of a model that reads a text token by token."""

from dataclasses import replace
from typing import cast

import torch

from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.kernels.fusion import EAGER
from triaxis.models.gpt.block import Block
from triaxis.models.gpt.chunk import GPTChunk
from triaxis.models.inference.kv_cache import Cached, CachedLatents


class DecodingChunk(GPTChunk):
    """A chunk with the parameters of another, without dropout, whose activations are whole on every tp rank.

    One token cannot be cut along the sequence; each rank computes the same part of a matrix either way. A growing text never
    has one shape twice, so nothing is compiled for it. As in all inference, no operand is in FP8.
    """

    def __init__(self, chunk: GPTChunk) -> None:
        given = chunk.context
        super().__init__(
            replace(
                given,
                region=replace(given.region, sequence_parallel=False),
                kernels=replace(given.kernels, fusion=EAGER),
                experts=None if given.experts is None else given.experts.for_decoding(),
                forms={},
                mixing=Cached if given.model.mla is None else CachedLatents,
            ),
            chunk.stage,
        )
        self.train(False)

    def without_cache(self) -> str:
        """Return the name of an extension's class that keeps no keys and values of the tokens before; "": none does."""
        for block in self.blocks:
            attention = getattr(block, "attention", None)
            if not isinstance(getattr(attention, "mixer", None), Cached):
                return type(attention or block).__name__
        return ""

    def caches(self) -> list[Cached]:
        """Return the caches of the layers."""
        return [cast(Cached, cast(Block, block).attention.mixer) for block in self.blocks]

    def decode(self, x: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        """Read the next tokens of a sequence: a prompt into empty caches, afterwards one token at a time.

        Returns:
            Hidden states [s, 1, h] for the next stage; on the last stage this rank's columns of the logits that follow the
            last of the tokens, [1, 1, V_padded/t].
        """
        hidden = self._hidden(x, batch, self._layer_inputs(batch))
        return hidden if self.head is None else self._logits(hidden[-1:])
