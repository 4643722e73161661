"""Attention of this rank's query heads to keys and values, by the mixer that is chosen when the model is built.

Mixer            this rank has whole rows
GatheredKeys     it has parts of rows: a kernel attends while the other ranks' keys and values arrive (`attention.py`)
GatheredRows     the same, gathered at once, before attention (`gathered_rows.py`)
ExchangedHeads   it has parts of rows, and in attention whole rows of some heads (`ulysses.py`)
Cached           it reads a text token by token (`models/inference/kv_cache.py`)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from triaxis.engine.activations.saved_tensors import ATTENTION, SavedTensors
from triaxis.engine.kernels.attention import attention
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.kernels.registry import Kernels
from triaxis.engine.tensor_parallel.dropout import DropoutKeys, dropout
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

Made = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Makes k [b, n_kv, s_k, d] and v [b, n_kv, s_k, d_v] of rows."""


def as_they_are(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, where rows are these."""
    return k, v


@dataclass(kw_only=True, eq=False)
class Mixer:
    """Attention of a layer to whole rows.

    Attributes:
        name: of the layer's attention.
        first_head: number of this rank's first query head among the model's.
        scale, softcap: of the logits, as of `triaxis.engine.kernels.attention.attention`.
        dropout: probability that a probability is dropped.
        sinks: [n], of this rank's query heads; None: none.
        made: makes keys and values of rows.
    """

    name: str
    kernels: Kernels
    saved: SavedTensors
    first_head: int
    scale: float | None
    softcap: float | None
    dropout: float
    sinks: ShardedParameter | None
    made: Made = as_they_are

    def __post_init__(self) -> None:
        self._attended = self.saved.recomputed_inside(ATTENTION, self.core)

    def __call__(
        self, q: torch.Tensor, rows: Sequence[torch.Tensor], mask: Mask, keys: DropoutKeys | None
    ) -> torch.Tensor:
        """Attend from q [s, b, n, d] to rows -> [s, b, n * d_v].

        Args:
            q: queries of this rank's tokens.
            rows: what keys and values are made of, [s, b, n_i, d_i] of the same tokens.
            mask: of whole rows, and the part of them that these tokens are.
            keys: of dropout; None: nothing is dropped.
        """
        return self.mixed(q, rows, mask, keys)

    def mixed(
        self, q: torch.Tensor, rows: Sequence[torch.Tensor], mask: Mask, keys: DropoutKeys | None, first: int = 0
    ) -> torch.Tensor:
        """Attend from q [s, b, n, d] to rows [s_k, b, ..]; q has this rank's query heads from `first` on."""
        return self._attended(heads_first(q, *rows), self.kernels.choices.attention, mask, keys, first)

    def core(
        self, tensors: Sequence[torch.Tensor], kernel: str, mask: Mask, keys: DropoutKeys | None, first: int
    ) -> torch.Tensor:
        """Attend from q [b, n, s, d] to rows [b, .., s_k, ..], which are `tensors` -> [s, b, n * d_v].

        s_k = s, causal; or s = 1, with the query at the last of the s_k positions; or q is the mask's part of the rows.
        """
        q, *rows = tensors
        return self.attend(kernel, mask, keys, first, q, *self.made(*rows))

    def attend(
        self,
        kernel: str,
        mask: Mask,
        keys: DropoutKeys | None,
        first: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to keys and values: the same with k [b, n_kv, s_k, d] and v [b, n_kv, s_k, d_v]."""
        mixed = attention(
            *(kernel, q, k, v, mask),
            # A single query sees every key, and torch's causal mask would hide all but the first from it.
            is_causal=q.shape[2] > 1,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks_of(slice(first, first + q.shape[1])),
            te=self.kernels.te_attention,
            drop=partial(self._drop, keys, first),
        )
        return tokens_first(mixed)

    def sinks_of(self, heads: slice) -> torch.Tensor | None:
        """Return the sinks of some of this rank's query heads, for autograd."""
        return None if self.sinks is None else self.sinks.tracked()[heads]

    def _drop(self, keys: DropoutKeys | None, first: int, probabilities: torch.Tensor) -> torch.Tensor:
        """Apply dropout to probabilities [b, n, s, s_k]; the heads begin with this rank's `first`."""
        if keys is None or not self.dropout:
            return probabilities
        _, n, s, s_k = probabilities.shape
        head, column = (torch.arange(count, device=probabilities.device) for count in (n, s_k))
        row = keys.rows(s, probabilities.device).t()[:, None, :, None]
        positions = ((self.first_head + first + head).view(-1, 1, 1) * s_k + row) * s_k + column
        site, fusion = f"{self.name}.dropout", self.kernels.fusion
        return dropout(probabilities, self.dropout, keys, site, positions, batch_dim=0, fusion=fusion)


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return [s, b, n_i, d_i] as [b, n_i, s, d_i]."""
    return [each.permute(1, 2, 0, 3) for each in tensors]


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Return x [b, n, s, d] as [s, b, n * d]."""
    return x.permute(2, 0, 1, 3).flatten(2)
