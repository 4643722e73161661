"""Bugs of context parallelism, planted in ranks under verification (see `planted.py`); most are ones that other engines shipped."""

from dataclasses import replace
from typing import Any

import torch

import triaxis.engine.context_parallel.attention
import triaxis.models.gpt.chunk
from tests.parity.cases import Case
from tests.verify.bug import Bug, anything, is_attention, is_sample
from triaxis.engine.activations.linear_map import mapped
from triaxis.engine.comm.backends import Pending
from triaxis.engine.context_parallel.attention import ContextParallelRegion, HeadSlices, pack_keys_and_values
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.context_parallel.mixer import Mixer
from triaxis.engine.context_parallel.ulysses import ExchangedHeads
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.kernels.masked_attention import Mask
from triaxis.engine.step import Engine
from triaxis.engine.tensor_parallel.dropout import DropoutKeys
from triaxis.models.gpt.chunk import GPTChunk


def _change_cut(change: Any) -> None:
    """Let `change` make this rank's batch from the whole one and the right part of it."""
    cut = ContextCut.__call__

    def changed(self: ContextCut, whole: MicroBatch) -> MicroBatch:
        mine = cut(self, whole)
        return mine if mine.part is None else change(whole, mine)

    ContextCut.__call__ = changed  # type: ignore[method-assign]


def positions_count_from_each_part() -> None:
    _change_cut(
        lambda whole, mine: replace(mine, position_ids=torch.arange(mine.tokens.shape[1]).expand_as(mine.tokens))
    )


def labels_are_shifted_after_the_cut() -> None:
    _change_cut(lambda whole, mine: replace(mine, labels=mine.tokens.roll(-1, dims=1)))


def every_rank_counts_all_tokens_of_the_sample() -> None:
    _change_cut(lambda whole, mine: replace(mine, num_tokens=whole.num_tokens))


def ranks_hold_the_same_half() -> None:
    cut = ContextCut.__call__
    ContextCut.__call__ = lambda self, whole: cut(replace(self, index=0), whole)  # type: ignore[method-assign]


def documents_count_within_the_part() -> None:
    """Lengths of a row's documents, cut off at the part's size."""

    def shorter(whole: MicroBatch, mine: MicroBatch) -> MicroBatch:
        assert whole.documents is not None
        rows = [[1] * sum(row) for row in whole.documents.lengths]
        return replace(mine, documents=Documents.of(rows))

    _change_cut(shorter)


def the_loss_is_averaged_over_cp() -> None:
    loss = Engine._loss

    def averaged(self: Engine, *args: Any) -> torch.Tensor:
        found = loss(self, *args)
        return found / self.topology.sizes.cp if found.dim() == 0 else found

    Engine._loss = averaged  # type: ignore[method-assign]


def gradients_of_keys_and_values_stay_where_they_are() -> None:
    def own(self: Any, k: torch.Tensor, v: torch.Tensor, part: SequencePart, dtype: torch.dtype) -> Pending:
        index = part.positions[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
        return Pending(pack_keys_and_values(k.gather(2, index), v.gather(2, index), slice(None)))

    ContextParallelRegion.sum_of = own  # type: ignore[method-assign]


def keys_stay_in_the_order_of_ranks() -> None:
    gathers = ContextParallelRegion.gathers

    def unordered(self: Any, packed: Any, part: SequencePart, purpose: str) -> Any:
        return gathers(self, packed, replace(part, to_rows=torch.arange(len(part.to_rows))), purpose)

    ContextParallelRegion.gathers = unordered  # type: ignore[method-assign]


def masks_are_aligned_with_the_first_key() -> None:
    """Queries of a rank see as if they were the first tokens of the row."""
    made = triaxis.engine.context_parallel.attention.masked_kernel

    def top_left(name: str, device: torch.device, mask: Mask, *args: Any) -> Any:
        assert mask.part is not None
        runs = tuple(((0, sum(stop - start for start, stop in row)),) for row in mask.part.runs)
        return made(name, device, replace(mask, part=replace(mask.part, runs=runs)), *args)

    triaxis.engine.context_parallel.attention.masked_kernel = top_left


def keys_of_the_backward_are_this_ranks_own() -> None:
    """The backward takes the gathered keys for local ones of the next layer: here, keys and values change places."""
    gathers = ContextParallelRegion.gathers

    def swapped(self: Any, packed: Any, part: SequencePart, purpose: str) -> Any:
        for found in gathers(self, packed, part, purpose):
            yield found[::-1] if purpose == "backward" else found

    ContextParallelRegion.gathers = swapped  # type: ignore[method-assign]


def dropout_counts_rows_of_the_part() -> None:
    keys = triaxis.models.gpt.chunk.DropoutKeys
    triaxis.models.gpt.chunk.DropoutKeys = lambda *given: keys(*given[:-1])  # type: ignore[assignment, misc]


def rotation_counts_from_each_part() -> None:
    tables = triaxis.models.gpt.chunk.tables_by_rotary

    def local(rotaries: Any, position_ids: torch.Tensor, dtype: torch.dtype) -> Any:
        return tables(rotaries, torch.arange(position_ids.shape[1]).expand_as(position_ids), dtype)

    triaxis.models.gpt.chunk.tables_by_rotary = local


def each_rank_has_the_parts_of_the_microbatch_before() -> None:
    inputs = GPTChunk._layer_inputs
    latest: dict[int, Any] = {}

    def lag(self: GPTChunk, batch: Any) -> Any:
        before = latest.get(id(self), batch)
        latest[id(self)] = batch
        return inputs(self, replace(batch, part=before.part))

    GPTChunk._layer_inputs = lag  # type: ignore[method-assign]


def query_heads_of_a_piece_read_the_keys_of_another() -> None:
    made = triaxis.engine.context_parallel.attention.pieces_of

    def turned(num_heads: int, num_kv_heads: int) -> list[HeadSlices]:
        pieces = made(num_heads, num_kv_heads)
        return [replace(one, keys=other.keys) for one, other in zip(pieces, pieces[1:] + pieces[:1], strict=True)]

    triaxis.engine.context_parallel.attention.pieces_of = turned


def the_last_piece_has_the_gradients_of_the_first() -> None:
    made = triaxis.engine.context_parallel.attention.local_gradients
    first: list[Any] = []

    def stale(summed: Pending, dtype: torch.dtype) -> Any:
        first.append(made(summed, dtype))
        # Two key/value heads are two pieces.
        return first.pop(0) if len(first) == 2 else first[0]

    triaxis.engine.context_parallel.attention.local_gradients = stale


def heads_come_back_in_another_order() -> None:
    """The ranks' heads come back interleaved."""

    def interleaved(self: ExchangedHeads, x: torch.Tensor) -> torch.Tensor:
        received = self.exchanged(x.unflatten(0, (self.axis.size, -1)), "out")
        return received.permute(1, 2, 3, 0, 4).flatten(2, 3)

    ExchangedHeads.to_tokens = interleaved  # type: ignore[method-assign]


def gradients_of_exchanged_heads_stay_where_they_are() -> None:
    exchanged = ExchangedHeads.exchanged
    ExchangedHeads.exchanged = lambda self, x, name: mapped(  # type: ignore[method-assign]
        x, lambda x: exchanged(self, x, name), torch.clone
    )


def every_rank_has_the_dropout_of_the_first_heads() -> None:
    drop = Mixer._drop
    Mixer._drop = lambda self, keys, first, probabilities: drop(self, keys, 0, probabilities)  # type: ignore[method-assign]


assert DropoutKeys is triaxis.models.gpt.chunk.DropoutKeys

ROPE = Case("llama", cp=2, dp=2, num_layers=2)
HEADS = Case("gpt_untied", cp=2, dp=2, num_layers=2, cp_method="ulysses")
KINDS = Case("kinds", cp=2, tp=2, documents=True, num_layers=4)

BUGS = (
    Bug(positions_count_from_each_part, ROPE, "samples", is_sample, "cp", "vanishes with cp=1"),
    Bug(labels_are_shifted_after_the_cut, ROPE, "samples", is_sample, "cp", "vanishes with cp=1"),
    Bug(ranks_hold_the_same_half, KINDS, "samples", is_sample, "cp", "vanishes with cp=1"),
    Bug(every_rank_counts_all_tokens_of_the_sample, ROPE, "loss", anything, "cp", "vanishes with cp=1"),
    Bug(documents_count_within_the_part, KINDS, "samples", is_sample, "cp", "vanishes with cp=1"),
    Bug(the_loss_is_averaged_over_cp, ROPE, "loss", anything, "cp", "vanishes with cp=1"),
    Bug(gradients_of_keys_and_values_stay_where_they_are, ROPE, "gradient", anything, "cp", "vanishes with cp=1"),
    Bug(keys_stay_in_the_order_of_ranks, ROPE, "output", is_attention(0), "cp", "vanishes with cp=1"),
    Bug(masks_are_aligned_with_the_first_key, ROPE, "output", is_attention(0), "cp", "vanishes with cp=1"),
    Bug(keys_of_the_backward_are_this_ranks_own, ROPE, "gradient", anything, "cp", "vanishes with cp=1"),
    Bug(
        dropout_counts_rows_of_the_part,
        Case("gpt_dropout", cp=2, num_layers=2),
        "output",
        lambda name: name == "embedding",
        "cp",
        "vanishes with cp=1",
    ),
    Bug(rotation_counts_from_each_part, ROPE, "output", is_attention(0), "cp", "vanishes with cp=1"),
    Bug(
        each_rank_has_the_parts_of_the_microbatch_before,
        KINDS,
        "output",
        is_attention(0),
        "cp",
        "vanishes with cp=1",
    ),
    Bug(query_heads_of_a_piece_read_the_keys_of_another, ROPE, "output", is_attention(0), "cp", "vanishes with cp=1"),
    Bug(the_last_piece_has_the_gradients_of_the_first, ROPE, "gradient", anything, "cp", "vanishes with cp=1"),
    Bug(heads_come_back_in_another_order, HEADS, "output", is_attention(0), "cp", "vanishes with cp=1"),
    Bug(gradients_of_exchanged_heads_stay_where_they_are, HEADS, "gradient", anything, "cp", "vanishes with cp=1"),
    Bug(
        every_rank_has_the_dropout_of_the_first_heads,
        Case("gpt_dropout", cp=2, num_layers=2, cp_method="ulysses"),
        "output",
        is_attention(0),
        "cp",
        "vanishes with cp=1",
    ),
)
