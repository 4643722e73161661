"""The input side of a GPT, from tokens to hidden states.

tokens [b, s] -> [s(/t), b, h]; with sequence parallelism, each of t tp ranks keeps only its part of the sequence.
"""

import torch
from torch import nn

from triaxis.engine.linear.layers import VocabParallelEmbedding
from triaxis.engine.numerics.precision import accumulate
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.models.gpt.context import BuildContext


class Embedding(nn.Module):
    """Word embedding, plus learned positions and dropout if the model has them.

    `name` prefixes the name of the dropout site.
    """

    def __init__(self, context: BuildContext, name: str = "embedding") -> None:
        super().__init__()
        self.context, self.dropout = context, context.hidden_dropout(f"{name}.dropout")
        self.word = VocabParallelEmbedding(context.parameter("embedding.word.weight"), context.region)
        # Gemma rounds the factor to the weights' dtype (transformers' `Gemma2TextScaledWordEmbedding`).
        self.multiplier = torch.tensor(context.model.embedding_multiplier, dtype=context.dtype).item()
        has_table = context.model.position_kind.has_table
        self.position = context.parameter("embedding.position.weight") if has_table else None

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor, keys: DropoutKeys) -> torch.Tensor:
        """Embed tokens at the given positions, both int64 [b, s], as [s(/t), b, h]."""
        # Indexing keeps the memory order of the ids, and elementwise ops keep it from there on: merely transposed ids would
        # transpose the whole residual stream in memory.
        x = self.word(tokens.t().contiguous())
        if self.multiplier != 1:
            x = x * self.multiplier
        if self.position is not None:
            # x is already this rank's part of the sequence, so each rank adds its own tokens' positions.
            shard = self.context.region.shard_of_sequence(tokens.shape[1])
            table = accumulate(self.position.tracked())  # so its gradient is summed over samples in the wide dtype
            x = x + table[position_ids.t()[shard].contiguous()].to(x.dtype)
        return self.dropout(x, keys) if self.dropout is not None and self.training else x
