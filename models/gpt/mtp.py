"""A multi-token prediction layer on the last stage.

    tokens ahead [b, s] --word embedding--> [s(/t), b, h] --norm--.
    hidden before [s(/t), b, h] -----------------------------norm--+--> [s(/t), b, 2 h] --projection--> layer --> norm --> head

`engine/config/schema/mtp.py` has the formulas (2412.19437, section 2.2). Symbols: s tokens in each of b rows, h hidden size, t = tp
ranks; s(/t) is s/t with sequence parallelism, else s.

Every tp rank holds the projection's whole weight. With sequence parallelism, a rank multiplies only its part of the sequence, and
the rank's weight gradient is a partial sum. If sequence parallelism is off, each rank computes the whole product and gradient.
"""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import nn

from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.linear.layers import ColumnParallelLinear
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.engine.tensor_parallel.entered import outside_of
from triaxis.models.gpt.block import Block
from triaxis.models.gpt.context import BuildContext, LayerInputs, Positions
from triaxis.models.gpt.embedding import Embedding
from triaxis.models.gpt.losses import TokenLosses, token_grads


class TokensAhead(nn.Module):
    """The multi-token prediction layers, each reading the previous layer's hidden states.

    Args:
        first_place: index of the first of these layers in the chunk. A layer's index decides whether it is recomputed or offloaded.
    """

    def __init__(self, context: BuildContext, layers: Sequence[int], first_place: int) -> None:
        super().__init__()
        assert context.model.mtp is not None
        self.context, self.first_place = context, first_place
        self.weight = context.model.mtp.loss_weight / len(layers)
        self.layers = nn.ModuleList([TokenAhead(context, layer) for layer in layers])

    def forward(
        self, hidden: torch.Tensor, head: ColumnParallelLinear, batch: MicroBatch, inputs: LayerInputs
    ) -> list[torch.Tensor]:
        """Compute each layer's loss sum over unmasked labels, times `mtp.loss_weight` / number of layers.

        Each sum is a scalar. `hidden` [s(/t), b, h] is the head's input for the next token.
        """
        assert batch.ahead is not None and batch.mask_ahead is not None
        saved, choice = self.context.saved, self.context.recompute
        shared, tokens = inputs.positions.tables.values(), batch.labels
        sums: list[torch.Tensor] = []
        for place, (each, labels, mask) in enumerate(
            zip(self.layers, batch.ahead, batch.mask_ahead, strict=True), start=self.first_place
        ):
            ahead = cast(TokenAhead, each)
            x = ahead.inputs(hidden, tokens, batch.position_ids, inputs.keys)
            is_again = choice.granularity == "full" and (choice.method == "uniform" or place < choice.num_layers)
            run = partial(ahead, positions=inputs.positions, keys=inputs.keys)
            moves = place < self.context.num_offloaded
            hidden = ahead.norm(saved.run_layer(run, x, moves=moves, whole=is_again, shared=shared))
            grads = token_grads(self.context, mask.t(), 1 + len(sums), self.weight)
            sums.append((ahead.losses(hidden, head, labels, *grads) * mask.t()).sum() * self.weight)
            tokens = labels
        return sums


class TokenAhead(nn.Module):
    """A layer that predicts one token further ahead than the layer before it.

    Args:
        layer: layer number; numbering goes on after the model's ordinary layers.
    """

    def __init__(self, context: BuildContext, layer: int) -> None:
        super().__init__()
        name = f"layers.{layer}.mtp"
        self.context = context
        self.embedding = Embedding(context, f"{name}.embedding")
        self.embedding_norm, self.hidden_norm = (context.norm(f"{name}.{of}_norm") for of in ("embedding", "hidden"))
        self.projection = ColumnParallelLinear(
            [context.parameter(f"{name}.projection.weight")],
            [],
            outside_of(context.region),
            context.queue,
            f"{name}.projection",
            context.form,
        )
        self.block = (context.model.own.block or Block)(context, layer)
        self.norm = context.norm(f"{name}.norm")
        self.losses = (context.model.own.loss or TokenLosses)(context)

    def inputs(
        self, hidden: torch.Tensor, tokens: torch.Tensor, position_ids: torch.Tensor, keys: DropoutKeys
    ) -> torch.Tensor:
        """Embed the tokens ahead, int64 [b, s], and append `hidden` along the sequence.

        `hidden` is [s(/t), b, h], the result [2 s(/t), b, h].
        """
        return torch.cat((self.embedding(tokens, position_ids, keys), hidden))

    def forward(self, inputs: torch.Tensor, positions: Positions, keys: DropoutKeys) -> torch.Tensor:
        """Run the layer on `inputs` [2 s(/t), b, h], and return [s(/t), b, h].

        `inputs` is the embedded tokens followed by the hidden states, as `inputs()` joins them. Each half is normalised. Both are
        concatenated along h and projected from 2 h to h for the block. The caller applies `norm` to the result.
        """
        joined = self.context.saved.recomputed("norm", self._joined)(inputs)
        y: torch.Tensor = self.block(self.projection(joined), positions, keys)
        return y

    def _joined(self, inputs: torch.Tensor) -> torch.Tensor:
        embedded, hidden = inputs.chunk(2)
        return torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
