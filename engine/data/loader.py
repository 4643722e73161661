"""Delivers each step's microbatches as tensors on the device; one thread reads ahead.

    samples (mmap)  --thread, `prefetch_steps` ahead-->  CPU tensors [b, s] (pinned for CUDA)  --next_step-->  device

    tokens  t_0 t_1 ... t_{s-1}       labels  t_1 t_2 ... t_s       from a sample's s + 1 tokens
    ahead   t_2 t_3 ... t_s 0, and so on, one row per multi-token prediction layer
    positions   0 .. s - 1, or from 0 in every document

With `data.attention: within`, a microbatch also has the documents that limit attention. Every pipeline rank reads its samples from
the mmap itself, and nothing is broadcast. Steps are read in order, so the result does not depend on timing.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from triaxis.engine.config.schema.data import AttentionScope, PositionOrigin
from triaxis.engine.data.documents import Documents, document_positions, padded_boundaries
from triaxis.engine.data.sampler import NOTHING_SKIPPED, step_sample_ids
from triaxis.engine.data.samples import Sample, SampleSource, input_lengths, mask_ahead
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.errors import DataError


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The input to one forward pass; b = micro_batch_size, s = seq_length."""

    tokens: torch.Tensor
    """int64 [b, s]"""
    labels: torch.Tensor
    """int64 [b, s]: the next tokens"""
    loss_mask: torch.Tensor
    """bool [b, s]: False where the loss ignores the label; float32 weights if an extension's loss weighs labels"""
    position_ids: torch.Tensor
    """int64 [b, s]: 0 .. s - 1 in each row, or from 0 in each document"""
    sample_ids: list[int]
    """Sample id of each row."""
    num_tokens: float
    """Number of counted labels, or the sum of their weights; known on the host."""
    documents: Documents | None = None
    """Documents that limit attention; None: each token attends to every earlier token in its row."""
    part: SequencePart | None = None
    """This rank's part of each row, if context parallelism cuts rows. Tensors then have s/cp columns, but not `documents`."""
    ahead: torch.Tensor | None = None
    """int64 [D, b, s]: the tokens 1 .. D places after the labels, 0 past the row's end; None: nothing predicts them."""
    mask_ahead: torch.Tensor | None = None
    """bool [D, b, s]: True where a token in `ahead` is predicted and counted; None: `ahead` is None."""
    num_ahead: tuple[int, ...] = ()
    """Number of tokens predicted at each distance 1 .. D."""
    rank_work: tuple[int, ...] | None = None
    """For each context-parallel rank: the number of keys that its queries see, summed over queries and layers.

    None if rows are not cut or each row is one document.
    """
    samples: torch.Tensor | None = None
    """int64 [b]: `sample_ids`, for dropout's masks; None: the model has no dropout."""


def count_labels(microbatches: Sequence[MicroBatch]) -> list[float]:
    """Sum label counts over microbatches. The 1 + D sums count next-token labels, then labels 1 .. D tokens further ahead."""
    return [sum(counts) for counts in zip(*((each.num_tokens, *each.num_ahead) for each in microbatches), strict=True)]


class Batches:
    """An endless sequence of one dp rank's steps, starting after `consumed_samples` samples.

    Args:
        dataset: source that has every sample id >= 0.
        global_batch_size, micro_batch_size, dp, dp_rank: batch sizes in samples and dp coordinates; see `engine/data/sampler.py`.
        consumed_samples: samples that all dp ranks consumed in earlier steps.
        device: device for the tensors that `next_step` returns.
        skipped: ranges of sample ids to leave out.
        prefetch_steps: steps read ahead, at least 1; host memory grows with it.
        attention, positions: values of the settings `data.attention` and `data.positions`.
        num_ahead: D, number of tokens beyond the next one that each position predicts (`model.mtp.num_layers`).
        weigh: function (tokens, labels, mask) -> label weights [b, s] (LossPart of `engine/config/schema/extension_parts.py`).
            None: the loss mask alone counts labels.
        cut: function (microbatch) -> this context-parallel rank's tokens of it; None: ranks hold whole rows.
        drops: whether the model has dropout.
        evens_boundaries: whether all microbatches of a step, on all dp ranks, have equally many boundaries of documents, and no
            fewer than in the step before. CUDA graphs need it.

    Raises:
        DataError: prefetch_steps < 1.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp: int,
        dp_rank: int,
        consumed_samples: int,
        device: torch.device | str,
        skipped: SkippedRanges = NOTHING_SKIPPED,
        prefetch_steps: int = 2,
        attention: AttentionScope = "across",
        positions: PositionOrigin = "sample",
        num_ahead: int = 0,
        weigh: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        cut: Callable[[MicroBatch], MicroBatch] | None = None,
        drops: bool = True,
        evens_boundaries: bool = False,
    ) -> None:
        if prefetch_steps < 1:
            raise DataError(f"prefetch_steps = {prefetch_steps}: must be at least 1.")
        step_sample_ids(consumed_samples, global_batch_size, micro_batch_size, dp, dp_rank)
        self.dataset = dataset
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.dp, self.dp_rank = dp, dp_rank
        self.attention, self.positions = attention, positions
        self._num_ahead, self._weigh, self._cut, self._drops = num_ahead, weigh, cut, drops
        self._evens_boundaries, self._num_boundaries = evens_boundaries, 0
        self.skipped = skipped
        self.device = torch.device(device)
        self.consumed_samples = consumed_samples
        """Samples consumed before the next step."""
        self._next_to_read = consumed_samples
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: deque[Future[list[MicroBatch]]] = deque()
        self._closed = False
        for _ in range(prefetch_steps):
            self._read_one_more()

    def next_step(self) -> list[MicroBatch]:
        """Return the next step's microbatches, on the device.

        An error in the reading thread is raised here and at every later call, so no step is skipped.

        Raises:
            DataError: the batches are closed, or a sample cannot be read.
        """
        if self._closed:
            raise DataError("the batches are closed; create new ones with the current consumed_samples.")
        microbatches = self._ahead[0].result()
        self._ahead.popleft()
        self._read_one_more()
        self.consumed_samples += self.global_batch_size
        return [self._to_device(microbatch) for microbatch in microbatches]

    def next_labels(self) -> list[float]:
        """Wait for the upcoming step and return its label counts (`count_labels`); zeros if the step cannot be read."""
        upcoming = self._ahead[0]
        return [0] * (1 + self._num_ahead) if upcoming.exception() else count_labels(upcoming.result())

    def close(self) -> None:
        """Stop reading and wait for the thread. A second call is harmless."""
        self._closed = True
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _read_one_more(self) -> None:
        self._ahead.append(self._reader.submit(self._read_step, self._next_to_read))
        self._next_to_read += self.global_batch_size

    def _read_step(self, consumed_samples: int) -> list[MicroBatch]:
        def ids_of(dp_rank: int) -> list[list[int]]:
            sizes = self.global_batch_size, self.micro_batch_size, self.dp
            return step_sample_ids(consumed_samples, *sizes, dp_rank, self.skipped)

        if self._evens_boundaries:
            every = [ids for dp_rank in range(self.dp) for ids in ids_of(dp_rank)]
            self._num_boundaries = max(self._num_boundaries, padded_boundaries(max(map(self._num_documents, every))))
        return [self._read_microbatch(sample_ids) for sample_ids in ids_of(self.dp_rank)]

    def _num_documents(self, sample_ids: Sequence[int]) -> int:
        return sum(len(input_lengths(self.dataset.lengths(sample_id))) for sample_id in sample_ids)

    def _read_microbatch(self, sample_ids: list[int]) -> MicroBatch:
        samples = [self.dataset[sample_id] for sample_id in sample_ids]
        tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
        lengths = [input_lengths(sample.lengths) for sample in samples]
        starts = [row if self.positions == "document" else (sum(row),) for row in lengths]
        loss_mask = np.stack([sample.loss_mask for sample in samples])
        microbatch = MicroBatch(
            tokens=tokens[:, :-1].contiguous(),
            labels=tokens[:, 1:].contiguous(),
            loss_mask=torch.from_numpy(loss_mask),
            position_ids=torch.from_numpy(np.stack([document_positions(row) for row in starts])),
            sample_ids=sample_ids,
            num_tokens=int(loss_mask.sum()),
            documents=Documents.of(lengths, self._num_boundaries) if self.attention == "within" else None,
            samples=torch.tensor(sample_ids) if self._drops else None,
        )
        microbatch = self._with_tokens_ahead(microbatch, samples)
        if self._weigh is not None:
            microbatch = weighted(microbatch, self._weigh)
        # Labels were shifted above, in whole rows: the label at a run's end is a token that another rank holds.
        microbatch = microbatch if self._cut is None else self._cut(microbatch)
        # Only a copy from pinned memory overlaps with GPU work.
        return self._map(microbatch, torch.Tensor.pin_memory) if self.device.type == "cuda" else microbatch

    def _with_tokens_ahead(self, microbatch: MicroBatch, samples: list[Sample]) -> MicroBatch:
        if not self._num_ahead:
            return microbatch
        distances = range(1, self._num_ahead + 1)
        ahead = torch.zeros(self._num_ahead, *microbatch.labels.shape, dtype=torch.int64)
        for row, distance in zip(ahead, distances, strict=True):
            row[:, :-distance] = microbatch.labels[:, distance:]
        within = self.attention == "within"
        masks = [[mask_ahead(one, distance, within_documents=within) for one in samples] for distance in distances]
        counted = torch.from_numpy(np.array(masks))
        counts = tuple(int(count) for count in counted.sum((1, 2)))
        return replace(microbatch, ahead=ahead, mask_ahead=counted, num_ahead=counts)

    def _to_device(self, microbatch: MicroBatch) -> MicroBatch:
        return self._map(microbatch, lambda tensor: tensor.to(self.device, non_blocking=True))

    @staticmethod
    def _map(microbatch: MicroBatch, change: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        def changed(value: Any) -> Any:
            if isinstance(value, Documents | SequencePart):
                return value.map(change)
            return change(value) if isinstance(value, torch.Tensor) else value

        return replace(microbatch, **{one.name: changed(getattr(microbatch, one.name)) for one in fields(microbatch)})


def weighted(
    microbatch: MicroBatch, weigh: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
) -> MicroBatch:
    """Replace the microbatch's loss mask with label weights, and `num_tokens` with their sum.

    Raises:
        DataError: the weights have the wrong shape, or one is negative or not finite.
    """
    # Row by row, so that no weight depends on which samples share the microbatch.
    rows = zip(microbatch.tokens.split(1), microbatch.labels.split(1), microbatch.loss_mask.split(1), strict=True)
    weights = torch.cat([weigh(*row) for row in rows]).to(torch.get_default_dtype())
    if weights.shape != microbatch.labels.shape or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise DataError(
            f"the extension's loss weights have the shape {list(weights.shape)} and go from {float(weights.min())} to "
            f"{float(weights.max())}. They must have the shape {list(microbatch.labels.shape)}, and be finite and at least 0, "
            "because the loss is divided by their sum."
        )
    return replace(microbatch, loss_mask=weights, num_tokens=weights.sum(dtype=torch.float64).item())
