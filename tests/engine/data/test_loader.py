"""Steps come in order, the same for every depth of reading ahead, and an error in the thread is not lost."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from triaxis.engine.config.schema.data import AttentionScope, DataConfig, PositionOrigin
from triaxis.engine.data import order_pieces
from triaxis.engine.data import samples as samples_module
from triaxis.engine.data.blend import Blend
from triaxis.engine.data.datasets import open_datasets
from triaxis.engine.data.loader import Batches, MicroBatch
from triaxis.engine.data.samples import Sample, SampleStream, input_lengths
from triaxis.engine.data.synthetic import SyntheticDataset
from triaxis.engine.errors import DataError

DATASET = SyntheticDataset(seed=1, vocab_size=50, seq_length=6, mask_fraction=0.5)


def open_batches(
    dataset: object = DATASET, *, dp: int = 2, dp_rank: int = 0, consumed: int = 0, ahead: int = 2
) -> Batches:
    return Batches(
        dataset,  # type: ignore[arg-type]
        global_batch_size=8,
        micro_batch_size=2,
        dp=dp,
        dp_rank=dp_rank,
        consumed_samples=consumed,
        device="cpu",
        prefetch_steps=ahead,
    )


def rows(step: list[MicroBatch]) -> dict[int, list[int]]:
    return {
        sample_id: tokens.tolist()
        for microbatch in step
        for sample_id, tokens in zip(microbatch.sample_ids, microbatch.tokens, strict=True)
    }


def test_the_order_of_the_next_epoch_is_built_ahead(
    write_corpus: Callable[..., str], numbered_documents: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Late in an epoch that is long for its pieces; a short one waits for no build worth a thread."""
    prefix = write_corpus(numbered_documents)
    dataset = open_datasets(DataConfig(train=[prefix], split=(1, 0, 0)), 8, 3, vocab_size=5000).train
    assert isinstance(dataset, Blend)
    (stream,) = dataset.sources
    assert isinstance(stream, SampleStream)
    late = int(0.9 * stream.samples_per_epoch)

    def built() -> list[int]:
        for thread in threading.enumerate():
            if thread.name == "order of epoch 1":
                thread.join()
        return sorted(int(path.name[6:10]) for path in Path(f"{prefix}.cache").glob("*.index"))

    dataset[late + 1]
    assert built() == [0]
    monkeypatch.setattr(order_pieces, "PIECE", 16)
    dataset[late - 1]
    dataset.lengths(late + 1)  # of a report, which builds nothing
    assert built() == [0]
    batches = open_batches(dataset, dp=1, consumed=late - 6, ahead=1)
    batches.next_step()
    batches.close()
    assert built() == [0, 1]
    monkeypatch.setattr(samples_module, "open_epoch", None)
    assert np.array_equal(np.sort(stream.epoch(1).sample_order), np.arange(stream.samples_per_epoch)), "it is open"
    dataset[late + 1]  # nothing is built twice


def test_a_microbatch_is_its_samples() -> None:
    batches = open_batches()
    batches.next_step()
    step = batches.next_step()
    assert [microbatch.sample_ids for microbatch in step] == [[8, 9], [12, 13]]
    for microbatch in step:
        assert microbatch.tokens.dtype == microbatch.labels.dtype == microbatch.position_ids.dtype == torch.int64
        assert microbatch.loss_mask.dtype == torch.bool
        assert microbatch.position_ids.tolist() == [list(range(6))] * 2
        for row, sample_id in enumerate(microbatch.sample_ids):
            sample = DATASET[sample_id]
            assert microbatch.tokens[row].tolist() == sample.tokens[:-1].tolist()
            assert microbatch.labels[row].tolist() == sample.tokens[1:].tolist()
            assert microbatch.loss_mask[row].tolist() == sample.loss_mask.tolist()
    batches.close()


@pytest.mark.parametrize("positions", ["sample", "document"])
@pytest.mark.parametrize("attention", ["across", "within"])
def test_documents_and_positions(attention: AttentionScope, positions: PositionOrigin) -> None:
    dataset = SyntheticDataset(3, 50, 12, mean_document_length=4)
    batches = Batches(
        dataset,
        global_batch_size=2,
        micro_batch_size=2,
        dp=1,
        dp_rank=0,
        consumed_samples=0,
        device="cpu",
        attention=attention,
        positions=positions,
    )
    (microbatch,) = batches.next_step()
    batches.close()
    lengths = tuple(input_lengths(dataset[sample_id].lengths) for sample_id in range(2))
    assert len(lengths[0]) > 1
    if attention == "within":
        assert microbatch.documents is not None and microbatch.documents.lengths == lengths
    else:
        assert microbatch.documents is None
    restarts = [np.concatenate([np.arange(length) for length in row]).tolist() for row in lengths]
    assert microbatch.position_ids.tolist() == (restarts if positions == "document" else [list(range(12))] * 2)


@pytest.mark.parametrize("attention", ["across", "within"])
def test_tokens_ahead_are_those_of_the_row(attention: AttentionScope) -> None:
    dataset = SyntheticDataset(3, 50, 12, mask_fraction=0.2, mean_document_length=4)
    batches = Batches(
        dataset,
        global_batch_size=2,
        micro_batch_size=2,
        dp=1,
        dp_rank=0,
        consumed_samples=0,
        device="cpu",
        attention=attention,
        num_ahead=2,
    )
    upcoming = batches.next_labels()
    (microbatch,) = batches.next_step()
    batches.close()
    assert microbatch.ahead is not None and microbatch.mask_ahead is not None
    counts = [0, 0]
    for row, sample in enumerate(dataset[sample_id] for sample_id in range(2)):
        document = [number for number, length in enumerate(sample.lengths) for _ in range(length)]
        for distance in (1, 2):
            for place in range(12):
                target = place + distance + 1
                is_there = target <= 12 and all(sample.loss_mask[place:target])
                if attention == "within":
                    is_there = is_there and document[place] == document[target]
                counts[distance - 1] += is_there
                assert bool(microbatch.mask_ahead[distance - 1, row, place]) == is_there
                if target <= 12:
                    assert microbatch.ahead[distance - 1, row, place] == sample.tokens[target]
    assert upcoming == [microbatch.num_tokens, *microbatch.num_ahead]
    assert microbatch.num_ahead == tuple(counts) and 0 < counts[1] < counts[0] < microbatch.num_tokens


def test_restart_depth_and_dp_change_nothing() -> None:
    straight = open_batches(dp=1, ahead=1)
    steps = [rows(straight.next_step()) for _ in range(4)]
    assert straight.consumed_samples == 32
    straight.close()
    ranks = [open_batches(dp=4, dp_rank=rank, consumed=16, ahead=3) for rank in range(4)]
    for step in steps[2:]:
        dealt: dict[int, list[int]] = {}
        for batches in ranks:
            dealt |= rows(batches.next_step())
        assert dealt == step
    for batches in ranks:
        batches.close()


class Breaks:
    """Sample 19 cannot be read; says how far the reading has come."""

    def __init__(self) -> None:
        self.largest = -1

    def __getitem__(self, sample_id: int) -> Sample:
        self.largest = max(self.largest, sample_id)
        if sample_id == 19:
            raise DataError("sample 19 is unreadable")
        return DATASET[sample_id]


def test_an_error_arrives_at_its_step_and_stays() -> None:
    batches = open_batches(Breaks(), dp=1)
    batches.next_step()
    batches.next_step()
    assert batches.next_labels() == [0], "the step before is still to be made"
    for _ in range(3):
        with pytest.raises(DataError, match="sample 19 is unreadable"):
            batches.next_step()
    assert batches.consumed_samples == 16
    batches.close()


def test_reading_ahead_is_bounded() -> None:
    dataset = Breaks()
    batches = open_batches(dataset, dp=1, ahead=1)
    deadline = time.monotonic() + 5
    while dataset.largest < 7 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert dataset.largest == 7, "one step of 8 samples ahead, and no further"
    batches.close()


def test_close_ends_the_thread_and_the_steps() -> None:
    before = threading.active_count()
    batches = open_batches()
    batches.next_step()
    batches.close()
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(DataError, match="closed"):
        batches.next_step()


def test_bad_arguments_are_refused_at_once() -> None:
    with pytest.raises(DataError, match="prefetch_steps"):
        open_batches(ahead=0)
    with pytest.raises(AssertionError, match="read by no rank"):
        open_batches(dp=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_on_the_way_to_the_gpu() -> None:
    batches = Batches(
        DATASET, global_batch_size=8, micro_batch_size=2, dp=1, dp_rank=0, consumed_samples=0, device="cuda"
    )
    assert all(microbatch.tokens.is_pinned() for microbatch in batches._ahead[0].result())
    for microbatch in batches.next_step():
        assert microbatch.tokens.is_cuda
        assert microbatch.labels.tolist() == [
            DATASET[sample_id].tokens[1:].tolist() for sample_id in microbatch.sample_ids
        ]
    batches.close()


def test_synthetic_samples_are_a_function_of_seed_and_id() -> None:
    same, other = SyntheticDataset(1, 50, 6, 0.5), SyntheticDataset(2, 50, 6, 0.5)
    assert all(np.array_equal(DATASET[i].tokens, same[i].tokens) for i in range(20))
    assert not all(np.array_equal(DATASET[i].tokens, other[i].tokens) for i in range(20))
    tokens = np.concatenate([DATASET[i].tokens for i in range(500)])
    assert (tokens.min(), tokens.max()) == (0, 49)
    masked = 1 - np.mean([DATASET[i].loss_mask for i in range(500)])
    assert 0.45 < masked < 0.55
    assert SyntheticDataset(1, 50, 6)[0].loss_mask.all()
    with pytest.raises(DataError, match="mask_fraction"):
        SyntheticDataset(1, 50, 6, 1.0)


def test_boundaries_of_documents_are_as_many_on_every_rank_and_never_fewer() -> None:
    dataset = SyntheticDataset(3, 50, 32, mean_document_length=3)
    ranks = [
        Batches(
            dataset,
            global_batch_size=4,
            micro_batch_size=1,
            dp=2,
            dp_rank=dp_rank,
            consumed_samples=0,
            device="cpu",
            attention="within",
            evens_boundaries=True,
        )
        for dp_rank in range(2)
    ]
    counts = []
    for _ in range(4):
        both = [microbatch.documents for rank in ranks for microbatch in rank.next_step()]
        (count,) = {len(documents.boundaries) for documents in both if documents is not None}
        counts.append(count)
    for rank in ranks:
        rank.close()
    assert counts == sorted(counts) and len(set(counts)) > 1
