"""Runs that change the length of their samples, or their blend, on the way: each label is read once, and none twice.

Every token of these corpora is another one, so a label says which place of the corpus it is.
"""

from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from triaxis.engine.config.quantities.run_phases import DataSegment
from triaxis.engine.data.blend import Blend, counts_of
from triaxis.engine.data.corpus.indexed import IndexedTokens, IndexedWriter
from triaxis.engine.data.datasets import continued
from triaxis.engine.data.remainder import ContinuedStream, Remainder
from triaxis.engine.data.samples import Sample, SampleSource, SampleStream
from triaxis.engine.data.skipped import SkippedRanges

NUM_TOKENS = 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora a, b and c of 700 tokens each in documents of 1 to 60 tokens."""
    folder = tmp_path_factory.mktemp("corpora")
    for number, name in enumerate("abc"):
        ends = np.cumsum(np.random.default_rng(number).integers(1, 61, 40))
        ends = np.append(ends[ends < NUM_TOKENS], NUM_TOKENS)
        with IndexedWriter(str(folder / name), "uint16") as writer:
            for start, end in zip([0, *ends[:-1]], ends, strict=True):
                writer.add_document(np.arange(start, end))
    return folder


def stream(folder: Path, name: str, seq_length: int) -> SampleStream:
    corpus = IndexedTokens(str(folder / name))
    return SampleStream(
        corpus,
        range(corpus.num_documents),
        seq_length=seq_length,
        seed=3,
        cache_dir=folder / "cache",
        vocab_size=NUM_TOKENS,
    )


def labels(sample: Sample) -> list[int]:
    """The labels that the loss counts."""
    counted: list[int] = sample.tokens[1:][sample.loss_mask].tolist()
    return counted


LENGTHS = st.integers(1, 40)


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.lists(st.tuples(st.floats(0.0, 0.95), LENGTHS), min_size=1, max_size=4))
@example(1, [(0.875, 1), (0.875, 22), (0.0, 22), (0.0, 1)])  # what is left of the epoch is no sample, twice
def test_each_label_of_an_epoch_is_read_once(folder: Path, first: int, cuts: list[tuple[float, int]]) -> None:
    samples = ContinuedStream(stream(folder, "a", first))
    read: Counter[int] = Counter()
    lost = (NUM_TOKENS - 1) % first

    def take(count: int) -> None:
        assert all(samples.epoch_of(sample_id) == 0 for sample_id in range(count))
        read.update(chain.from_iterable(labels(samples[sample_id]) for sample_id in range(count)))

    for share, seq_length in cuts:
        count = int(share * left_in_epoch(samples))
        take(count)
        before, samples = samples, samples.after(count, seq_length)
        if samples.stream is before.stream:
            continue
        if samples.remainder is None and samples.epoch_of(0) == 1:
            break  # the rest of the epoch was shorter than a sample, so the next one has begun
        if samples.remainder is None:
            # Nothing of the epoch was read: it is cut anew as a whole.
            assert not read
            lost = (NUM_TOKENS - 1) % seq_length
            continue
        # An unread remainder is cut again from what it was cut from, so what it left over is no loss.
        lost -= left_over(before.remainder) if before.remainder is not None and before.read + count == 0 else 0
        lost += left_over(samples.remainder)
        assert left_over(samples.remainder) < seq_length
    left = left_in_epoch(samples)
    take(left)
    assert samples.epoch_of(left) == 1
    assert set(read.values()) <= {1}
    assert len(read) == NUM_TOKENS - 1 - lost


def left_over(remainder: Remainder) -> int:
    """The labels of a remainder that its samples leave out, because too few tokens are left for another one."""
    end = len(remainder) * remainder.seq_length
    joins = int(np.count_nonzero(remainder.offsets[1:-1] > end))
    return int(remainder.offsets[-1]) - 1 - end - joins


def left_in_epoch(samples: ContinuedStream) -> int:
    """The samples of the first epoch that were not read."""
    if samples.remainder is not None:
        return len(samples.remainder) - samples.read
    return max(0, samples.stream.samples_per_epoch - samples.first)


def test_a_join_is_a_start_of_a_document_and_no_label(folder: Path) -> None:
    samples = ContinuedStream(stream(folder, "a", 10)).after(30, 25)
    assert samples.remainder is not None
    joined = 0
    for sample_id in range(len(samples.remainder)):
        sample = samples[sample_id]
        places = np.cumsum(sample.lengths)[:-1]
        jumps = np.flatnonzero(np.diff(sample.tokens) != 1) + 1
        assert set(jumps.tolist()) <= set(places.tolist())
        assert samples.lengths(sample_id) == sample.lengths
        masked = np.flatnonzero(~sample.loss_mask) + 1
        joined += len(masked)
        # The order of documents jumps too, but there the first token of the next document is a label.
        assert set(masked.tolist()) <= set(places.tolist())
    assert joined


def test_the_rest_of_an_epoch_is_followed_by_whole_ones(folder: Path) -> None:
    samples = ContinuedStream(stream(folder, "a", 10)).after(30, 25)
    assert samples.remainder is not None
    behind, whole = len(samples.remainder), stream(folder, "a", 25)
    for number in range(2 * whole.samples_per_epoch):
        expected = whole[whole.samples_per_epoch + number]
        assert samples[behind + number].tokens.tolist() == expected.tokens.tolist()


def test_at_the_end_of_an_epoch_nothing_is_left(folder: Path) -> None:
    before = stream(folder, "a", 10)
    samples = ContinuedStream(before).after(2 * before.samples_per_epoch, 25)
    assert samples.remainder is None
    assert samples.epoch_of(0) == 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 90), min_size=1, max_size=5))
def test_the_same_length_goes_on(folder: Path, counts: list[int]) -> None:
    samples, whole, read = ContinuedStream(stream(folder, "a", 16)), stream(folder, "a", 16), 0
    for count in counts:
        samples, read = samples.after(count, 16), read + count
        assert samples[7].tokens.tolist() == whole[read + 7].tokens.tolist()


def test_a_second_process_reads_the_same_remainder(folder: Path) -> None:
    first, again = (ContinuedStream(stream(folder, "a", 11)).after(17, 30).after(3, 8) for _ in range(2))
    assert [first[n].tokens.tolist() for n in range(20)] == [again[n].tokens.tolist() for n in range(20)]
    assert list((folder / "cache").glob("remainder-*"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 300))
def test_counts_are_those_of_the_blend(weights: list[int], num_samples: int) -> None:
    blend = Blend([SampleSourceOfNothing()] * len(weights), weights)
    located = Counter(blend.locate(sample_id)[0] for sample_id in range(num_samples))
    counts = counts_of(weights, num_samples)
    assert counts == [located[source] for source in range(len(weights))]
    assert all(abs(count - num_samples * w / sum(weights)) < 1 for count, w in zip(counts, weights, strict=True))


class SampleSourceOfNothing:
    def __getitem__(self, sample_id: int) -> Sample:
        raise AssertionError

    def lengths(self, sample_id: int) -> tuple[int, ...]:
        raise AssertionError


BLENDS = st.lists(
    st.tuples(st.integers(1, 5), st.sampled_from("abc")), min_size=1, max_size=3, unique_by=lambda one: one[1]
)
SEGMENT = st.tuples(BLENDS, st.integers(5, 60))


@settings(max_examples=40, deadline=None)
@given(st.lists(SEGMENT, min_size=1, max_size=4), st.integers(0, 40), st.integers(0, 15))
def test_each_corpus_goes_on_where_it_was_left(
    folder: Path, drawn: list[tuple[list[tuple[int, str]], int]], skip_from: int, num_skipped: int
) -> None:
    """Samples of one length over all segments are those of the corpus' stream, each once and in order."""
    skipped = SkippedRanges.of([(skip_from, skip_from + num_skipped)] if num_skipped else [])
    segments, position = [], 0
    for weighted, num_samples in drawn:
        train = tuple((float(weight), str(folder / name)) for weight, name in weighted)
        segments.append(DataSegment(train, 16, position))
        position += num_samples
    read: dict[str, list[list[int]]] = {}
    next_id = 0
    for number, (_, num_samples) in enumerate(drawn):
        source = continued(
            segments[: number + 1], skipped, lambda prefix, length: stream(folder, Path(prefix).name, length)
        )
        last = skipped.id_at(segments[number].first_position + num_samples - 1)
        for sample_id in range(next_id, last + 1):
            corpus, inner = source.locate(sample_id)
            one = source.sources[corpus]
            assert isinstance(one, ContinuedStream)
            read.setdefault(Path(one.corpus.prefix).name, []).append(one[inner].tokens.tolist())
        next_id = last + 1
    for name, samples in read.items():
        whole: SampleSource = stream(folder, name, 16)
        assert samples == [whole[number].tokens.tolist() for number in range(len(samples))]
