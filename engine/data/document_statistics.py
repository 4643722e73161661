"""Documents of the first steps of a run: how many, how long, and the attention work that they leave.

With `data.attention: within` a query sees the tokens of its own document, so attention costs what the lengths of documents make
of it. The first steps stand for the run: lengths come from the index, and no token is read.

    keys of a document of l tokens    l^2 / 2 without a window, m (l - m / 2) with m = min(l, window)
    (an integral in place of the sum over queries, as in the published 6 L a d s of a causal mask: half of s keys each)
"""

from dataclasses import dataclass
from statistics import fmean

from triaxis.engine.config.stage_work import keys_of
from triaxis.engine.data.sampler import step_sample_ids
from triaxis.engine.data.samples import SampleSource, input_lengths

MOST_SAMPLES = 1024
"""Samples that are looked at, or one step's where that has more."""

UNBROKEN = 100
"""Mean document length in samples above which a corpus seems to have lost its document ends."""


@dataclass(frozen=True, slots=True)
class DocumentStatistics:
    """The documents of some steps, by what each data-parallel rank reads.

    Attributes:
        seq_length: s, tokens of a sample.
        steps: for each step and dp rank, the lengths of the documents in the inputs of its samples; each sample's add up to s.
    """

    seq_length: int
    steps: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_samples(self) -> int:
        """Return the number of samples that were looked at."""
        return sum(length for step in self.steps for rank in step for length in rank) // self.seq_length

    @property
    def per_sample(self) -> float:
        """Return the mean number of documents in a sample, parts of documents included."""
        lengths = [length for step in self.steps for rank in step for length in rank]
        return len(lengths) * self.seq_length / sum(lengths)

    def rows(self) -> list[tuple[int, ...]]:
        """Return the documents of each sample, in the order of training of one rank after the other, step by step."""
        rows: list[tuple[int, ...]] = []
        for lengths in (rank for step in self.steps for rank in step):
            first, end = 0, 0
            for place, length in enumerate(lengths, start=1):
                end += length
                if end % self.seq_length == 0:
                    rows.append(lengths[first:place])
                    first = place
        return rows

    def keys_per_query(self, window: int | None) -> float:
        """Return the mean number of keys that a query sees within its document."""
        lengths = [length for step in self.steps for rank in step for length in rank]
        return sum(keys_of(length, window) for length in lengths) / sum(lengths)

    def imbalance(self, window: int | None) -> float:
        """Return the keys of the dp rank that has most of them over the mean of all ranks, averaged over steps; at least 1."""
        keys = [[sum(keys_of(length, window) for length in rank) for rank in step] for step in self.steps]
        return fmean(max(ranks) / fmean(ranks) for ranks in keys)


def one_document_per_sample(seq_length: int) -> DocumentStatistics:
    """Return the statistics of samples whose tokens attend across documents."""
    return DocumentStatistics(seq_length, (((seq_length,),),))


def measure_documents(
    source: SampleSource, *, seq_length: int, global_batch_size: int, micro_batch_size: int, dp: int
) -> DocumentStatistics:
    """Look at the lengths of the first steps' documents; the same on every rank.

    Raises:
        DataError: the index of the corpus cannot be read.
    """
    num_steps = max(1, MOST_SAMPLES // global_batch_size)

    def lengths_of(step: int, dp_rank: int) -> tuple[int, ...]:
        ids = step_sample_ids(step * global_batch_size, global_batch_size, micro_batch_size, dp, dp_rank)
        return tuple(
            length
            for microbatch in ids
            for sample_id in microbatch
            for length in input_lengths(source.lengths(sample_id))
        )

    return DocumentStatistics(
        seq_length, tuple(tuple(lengths_of(step, rank) for rank in range(dp)) for step in range(num_steps))
    )
