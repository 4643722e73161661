"""Defines the mixers, through which a rank's query heads attend to keys and values.

Mixer            the rank has whole rows
GatheredKeys     the rank has parts of rows, and attends while other ranks' keys and values arrive (`attention.py`)
GatheredRows     the rank has parts of rows, and gathers whole rows before attention (`gathered_rows.py`)
ExchangedHeads   the rank has parts of rows, and exchanges them for whole rows of some heads during attention (`ulysses.py`)
Cached           the rank generates text token by token (`models/inference/kv_cache.py`)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from triaxis.engine.activations.saved_tensors import ATTENTION, SavedTensors
from triaxis.engine.kernels.attention import attention
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.kernels.registry import Kernels
from triaxis.engine.tensor_parallel.dropout import DropoutKeys, dropout
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

Made = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Function from rows to k [b, n_kv, s_k, d] and v [b, n_kv, s_k, d_v]."""


def as_they_are(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return k and v unchanged: `Mixer.made` for layers whose `rows` are k and v."""
    return k, v


@dataclass(kw_only=True, eq=False)
class Mixer:
    """A layer's attention when this rank holds whole rows.

    Attributes:
        name: attention layer's name, also the prefix for its dropout site.
        kernels: the run's kernels.
        saved: policy that decides which tensors are saved, and which are recomputed.
        first_head: index of this rank's first query head in the model.
        scale, softcap: logit scale and soft cap, as in `triaxis.engine.kernels.attention.attention`.
        dropout: drop probability for attention probabilities.
        sinks: attention-sink logits [n] for this rank's query heads, or None.
        made: function (*rows) -> keys and values. The rows are per-token inputs: keys and values themselves, or MLA latents.
        copies_rows: whether the backward needs copies of the rows, not the rows.
    """

    copies_rows: ClassVar[bool] = False

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
        """Attend from q [s, b, n, d] to keys and values from `rows` -> [s, b, n * d_v].

        Args:
            q: queries for this rank's tokens.
            rows: k and v, or MLA latents, for the same tokens, [s, b, n_i, d_i] each; inputs to `self.made`.
            mask: mask for whole rows; `mask.part` gives the positions of this rank's queries.
            keys: dropout keys, or None to drop nothing.
        """
        return self.mixed(q, rows, mask, keys)

    def mixed(
        self, q: torch.Tensor, rows: Sequence[torch.Tensor], mask: Mask, keys: DropoutKeys | None, first: int = 0
    ) -> torch.Tensor:
        """Attend from q [s, b, n, d] to keys and values from `rows` -> [s, b, n * d_v].

        `rows` are k and v, or MLA latents, [s_k, b, n_i, d_i] each. q has this rank's query heads from index `first` on. If
        `self.saved` recomputes attention, the backward runs `core` again.
        """
        return self._attended(heads_first(q, *rows), self.kernels.choices.attention, mask, keys, first)

    def core(
        self, tensors: Sequence[torch.Tensor], kernel: str, mask: Mask, keys: DropoutKeys | None, first: int
    ) -> torch.Tensor:
        """Attend from q [b, n, s, d] to keys and values from rows -> [s, b, n * d_v].

        `tensors` is (q, *rows). The rows are k and v, or MLA latents, [b, n_i, s_k, d_i] each. Attention is causal:

            s = s_k    query i has position i
            s = 1      the query has the last position
            else       `mask.part` gives the queries' positions
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
        """Attend as in `core`, to k [b, n_kv, s_k, d] and v [b, n_kv, s_k, d_v].

        `keys` are dropout keys. `first` is the index of q's first head among this rank's query heads.
        """
        mixed = attention(
            *(kernel, q, k, v, mask),
            # A single query sees every key; torch's causal mask would leave it only the first.
            is_causal=q.shape[2] > 1,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks_of(slice(first, first + q.shape[1])),
            te=self.kernels.te_attention,
            drop=partial(self._drop, keys, first),
            fusion=self.kernels.fusion,
        )
        return tokens_first(mixed)

    def sinks_of(self, heads: slice) -> torch.Tensor | None:
        """Select the sinks for a range of this rank's query heads, tracked by autograd."""
        return None if self.sinks is None else self.sinks.tracked()[heads]

    def _drop(self, keys: DropoutKeys | None, first: int, probabilities: torch.Tensor) -> torch.Tensor:
        """Apply dropout to probabilities [b, n, s, s_k] for this rank's heads from `first` on."""
        if keys is None or not self.dropout:
            return probabilities
        # An element's mask depends on its head, row and column in the whole model, so it is equal in every layout.
        _, n, s, s_k = probabilities.shape
        head, column = (torch.arange(count, device=probabilities.device) for count in (n, s_k))
        row = keys.rows(s, probabilities.device).t()[:, None, :, None]
        positions = ((self.first_head + first + head).view(-1, 1, 1) * s_k + row) * s_k + column
        site, fusion = f"{self.name}.dropout", self.kernels.fusion
        return dropout(probabilities, self.dropout, keys, site, positions, batch_dim=0, fusion=fusion)


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """View tensors [s, b, n_i, d_i] as [b, n_i, s, d_i]."""
    return [each.permute(1, 2, 0, 3) for each in tensors]


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Reshape x [b, n, s, d] to [s, b, n * d]."""
    return x.permute(2, 0, 1, 3).flatten(2)
