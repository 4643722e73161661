"""Attends to whole rows for some heads, between two all-to-alls (2309.14509, section 3).

    q [s/c, b, n, d], k, v [s/c, b, n_kv, d] --all-to-all--> q [s, b, n/c, d], k, v [s, b, n_kv/c, d]
      --attention--> [s, b, n/c, d] --all-to-all--> [s/c, b, n, d]

Rank i out of c cp ranks holds tokens [i s/c, (i + 1) s/c) in each row. Inside attention it holds query heads [i n/c, (i + 1) n/c).
Attention work is equal on all ranks, whatever the documents are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from triaxis.engine.activations.linear_map import mapped
from triaxis.engine.comm.collectives import Axis
from triaxis.engine.comm.ledger import HEADS
from triaxis.engine.context_parallel.mixer import Mixer
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.layout.shard_spec import cut
from triaxis.engine.tensor_parallel.dropout import DropoutKeys


@dataclass(kw_only=True, eq=False)
class ExchangedHeads(Mixer):
    """Mixer that exchanges heads.

    Outside attention, a rank has some tokens for all heads; inside, all tokens for some heads.
    """

    axis: Axis

    def __call__(
        self, q: torch.Tensor, rows: Sequence[torch.Tensor], mask: Mask, keys: DropoutKeys | None
    ) -> torch.Tensor:
        """Attend from q [s/c, b, n, d] to `rows` -> [s/c, b, n * d].

        `rows` are this rank's k and v [s/c, b, n_kv, d]. Other ranks' tokens arrive through the exchange.
        """
        first, _ = cut(q.shape[2], self.axis.size, self.axis.index)
        mine, *whole = self.to_heads(q, *rows)
        # Rows are whole from here to the exchange back, so mask and dropout keys use whole-row positions.
        keys = None if keys is None else replace(keys, positions=None)
        mixed = self.mixed(mine, whole, replace(mask, part=None), keys, first)
        return self.to_tokens(mixed.unflatten(2, (mine.shape[2], -1))).flatten(2)

    def to_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Exchange tensors [s/c, b, n_i, d] for [s, b, n_i/c, d] in one collective. The results are views into one storage."""
        c = self.axis.size
        # [c, s/c, b, n_i/c, d]: dim 0 is the destination before the exchange, and the source, in row order, after it.
        by_rank = [each.unflatten(2, (c, -1)).permute(2, 0, 1, 3, 4) for each in tensors]
        received = self.exchanged(torch.cat(by_rank, dim=3), "in")
        return received.flatten(0, 1).split([each.shape[3] for each in by_rank], dim=2)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange [s, b, n/c, d] for [s/c, b, n, d]."""
        received = self.exchanged(x.unflatten(0, (self.axis.size, -1)), "out")
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def exchanged(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Send block i of x [c, ..] to rank i, and receive block i from rank i. `name` labels the call in the ledger."""
        return mapped(
            x,
            lambda x: self.axis.all_to_all(x, f"{HEADS} {name} forward").wait(),
            lambda grad: self.axis.all_to_all(grad, f"{HEADS} {name} backward").wait(),
        )
