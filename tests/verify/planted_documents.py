"""Bugs of documents and of layers with attentions of their own, planted in ranks under verification (see `planted.py`)."""

from dataclasses import replace
from typing import Any

import torch

import triaxis.engine.kernels.masked_attention as masked
import triaxis.models.gpt.attention
import triaxis.models.gpt.block
import triaxis.models.gpt.chunk
from tests.parity.cases import Case
from tests.verify.bug import Bug, anything, is_attention, is_sample
from triaxis.engine.config.schema.model import ModelConfig
from triaxis.engine.context_parallel.mixer import Mixer
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.loader import Batches, MicroBatch
from triaxis.engine.data.samples import Sample
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.models.gpt.attention import Attention
from triaxis.models.gpt.chunk import GPTChunk


def _change_batches(change: Any) -> None:
    """Let `change` replace the microbatch of every forward of a chunk."""
    forward = GPTChunk.forward

    def changed(self: GPTChunk, x: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
        return forward(self, x, change(self, batch))

    GPTChunk.forward = changed  # type: ignore[assignment, method-assign]


def later_stages_take_documents_of_the_microbatch_before() -> None:
    latest: dict[int, MicroBatch] = {}

    def lag(chunk: GPTChunk, batch: MicroBatch) -> MicroBatch:
        before = latest.get(id(chunk), batch)
        latest[id(chunk)] = batch
        return batch if chunk.embedding is not None else replace(batch, documents=before.documents)

    _change_batches(lag)


def documents_of_the_first_row_hold_for_all() -> None:
    def spread(chunk: GPTChunk, batch: MicroBatch) -> MicroBatch:
        assert batch.documents is not None
        return replace(batch, documents=Documents.of([batch.documents.lengths[0]] * len(batch.sample_ids)))

    _change_batches(spread)


def kinds_of_layers_count_from_each_stage() -> None:
    init = triaxis.models.gpt.block.Block.__init__
    seen: list[int] = []

    def counted(self: Any, context: Any, layer: int) -> None:
        init(self, context, layer)
        seen.append(layer)
        self.attention.kind = replace(context.model.layer_kind(layer - seen[0]), sinks=self.attention.kind.sinks)

    made = GPTChunk.__init__

    def with_all_tables(self: GPTChunk, context: Any, stage: Any) -> None:
        made(self, context, stage)
        self.rotaries = [context.model.layer_kind(layer).rotary for layer in range(context.model.num_layers)]

    triaxis.models.gpt.block.Block.__init__ = counted  # type: ignore[method-assign]
    GPTChunk.__init__ = with_all_tables  # type: ignore[method-assign]


def every_rank_has_the_sinks_of_the_first() -> None:
    forward = Attention.forward

    def first(self: Attention, *args: Any) -> torch.Tensor:
        sinks = self.mixer.sinks
        if sinks is not None:
            axis = self.context.region.axis
            value = sinks.value.detach().clone()
            axis.all_reduce(value if axis.index == 0 else value.zero_(), "planted").wait()
            sinks.value.data.copy_(value)
        return forward(self, *args)

    Attention.forward = first  # type: ignore[assignment, method-assign]


def a_window_has_one_key_too_many() -> None:
    made = triaxis.models.gpt.attention.Mask

    def wider(window: int | None, *others: Any) -> masked.Mask:
        return made(None if window is None else window + 1, *others)

    triaxis.models.gpt.attention.Mask = wider  # type: ignore[assignment, misc]


def scaled_frequencies_are_not_scaled() -> None:
    tables = triaxis.models.gpt.chunk.tables_by_rotary

    def plain(rotaries: Any, position_ids: torch.Tensor, dtype: torch.dtype) -> Any:
        found = tables(rotaries, position_ids, dtype)
        return {rotary: tables([replace(rotary, scaling=None)], position_ids, dtype).popitem()[1] for rotary in found}

    triaxis.models.gpt.chunk.tables_by_rotary = plain


def first_tokens_of_documents_are_counted() -> None:
    get = SyntheticDataset.__getitem__

    def counted(self: SyntheticDataset, sample_id: int) -> Sample:
        self.count_document_starts = True
        return get(self, sample_id)

    SyntheticDataset.__getitem__ = counted  # type: ignore[method-assign]


def documents_end_at_the_token_zero() -> None:
    read = Batches._read_microbatch

    def by_value(self: Batches, sample_ids: list[int]) -> MicroBatch:
        batch = read(self, sample_ids)
        lengths = []
        for row in batch.tokens:
            ends = (row[:-1] == 0).nonzero().flatten() + 1
            lengths.append(torch.cat((ends, torch.tensor([len(row)]))).diff(prepend=torch.tensor([0])).tolist())
        return replace(batch, documents=Documents.of(lengths))

    Batches._read_microbatch = by_value  # type: ignore[method-assign]


def attention_that_is_computed_again_forgets_documents() -> None:
    core = Mixer.core
    seen: dict[int, masked.Mask] = {}

    def forgetful(self: Mixer, tensors: Any, kernel: str, mask: masked.Mask, *args: Any) -> torch.Tensor:
        is_again = id(mask) in seen
        seen[id(mask)] = mask
        return core(self, tensors, kernel, replace(mask, documents=None) if is_again else mask, *args)

    Mixer.core = forgetful  # type: ignore[method-assign]


def sinks_are_decayed() -> None:
    import triaxis.models.specs as specs

    layer_specs = specs.layer_specs

    def decayed(model: ModelConfig, layer: int) -> Any:
        for spec in layer_specs(model, layer):
            yield replace(spec, decay=True) if spec.name.endswith("sinks") else spec

    specs.layer_specs = decayed


PACKED = Case("kinds", tp=2, pp=2, documents=True, micro_batch_size=2, global_batch_size=8, num_layers=4)

BUGS = (
    Bug(
        later_stages_take_documents_of_the_microbatch_before,
        PACKED,
        "output",
        is_attention(2),
        "pp",
        "vanishes with pp=1",
    ),
    Bug(
        kinds_of_layers_count_from_each_stage,
        PACKED,
        "output",
        is_attention(2),
        "pp",
        "vanishes with pp=1",
    ),
    Bug(
        every_rank_has_the_sinks_of_the_first,
        PACKED,
        "output",
        is_attention(0),
        "tp",
        "vanishes with tp=1",
    ),
    Bug(documents_of_the_first_row_hold_for_all, PACKED, "output", is_attention(0), None, "stays"),
    Bug(a_window_has_one_key_too_many, PACKED, "output", is_attention(0), None, "stays"),
    Bug(scaled_frequencies_are_not_scaled, PACKED, "output", is_attention(2), None, "stays"),
    Bug(first_tokens_of_documents_are_counted, PACKED, "samples", is_sample, None, "stays"),
    Bug(documents_end_at_the_token_zero, PACKED, "samples", is_sample, None, "stays"),
    Bug(
        attention_that_is_computed_again_forgets_documents,
        Case("kinds", dp=2, documents=True, num_layers=2, recompute=("selective", "uniform", 1)),
        "gradient",
        anything,
        None,
        "vanishes with recompute.granularity=none",
    ),
    Bug(
        sinks_are_decayed,
        PACKED,
        "master",
        lambda name: name.endswith("sinks"),
        None,
        "decay on norms or biases",
    ),
)
