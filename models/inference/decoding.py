"""Run a model chunk on a text token by token, with cached keys and values."""

from dataclasses import replace
from typing import cast

import torch

from triaxis.engine.data.loader import MicroBatch
from triaxis.models.gpt.block import Block
from triaxis.models.gpt.chunk import GPTChunk
from triaxis.models.inference.kv_cache import Cached, CachedLatents


class DecodingChunk(GPTChunk):
    """Chunk that generates with another chunk's parameters, without dropout.

    Sequence parallelism is off, because one token cannot be split along the sequence. Every tp rank then holds whole activations.
    Nothing is compiled, because a growing text never has the same shape twice. No operand is in FP8.
    """

    def __init__(self, chunk: GPTChunk) -> None:
        given = chunk.context
        super().__init__(
            replace(
                given,
                region=replace(given.region, sequence_parallel=False),
                kernels=given.kernels.for_any_length(),
                experts=None if given.experts is None else given.experts.for_decoding(),
                forms={},
                mixing=Cached if given.model.mla is None else CachedLatents,
            ),
            chunk.stage,
        )
        self.train(False)

    def without_cache(self) -> str:
        """Class name of the first attention module or block without a cache. "": `decode` can run."""
        for block in self.blocks:
            attention = getattr(block, "attention", None)
            if not isinstance(getattr(attention, "mixer", None), Cached):
                return type(attention or block).__name__
        return ""

    def caches(self) -> list[Cached]:
        """List the layers' caches, in layer order."""
        return [cast(Cached, cast(Block, block).attention.mixer) for block in self.blocks]

    def decode(self, x: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        """Compute the forward of new tokens, and cache their keys and values.

        The first call takes a prompt, each later call one token.

        Returns:
            Hidden states [s, 1, h] for the next stage. On the last stage, this rank's logit columns [1, 1, V_padded/t] for the
            token after the new ones.
        """
        hidden = self._hidden(x, batch, self._layer_inputs(batch))
        return hidden if self.head is None else self._logits(hidden[-1:])
