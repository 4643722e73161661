"""Measures the documents in a run's first steps, and the attention work that they cause.

With `data.attention: within` a query sees only its own document, so attention cost depends on the document lengths. The first steps
stand for the whole run. Lengths come from the corpus index, so no token is read.

A document with l tokens has this many (query, key) pairs, called its keys:

    without a window    l^2 / 2
    with a window       m (l - m / 2), m = min(l, window)

An integral replaces the exact sum over queries, as in the published FLOP count for causal attention.
"""

from dataclasses import dataclass
from statistics import fmean

from triaxis.engine.config.quantities.stage_work import keys_of
from triaxis.engine.data.sampler import step_sample_ids
from triaxis.engine.data.samples import SampleSource, input_lengths

MOST_SAMPLES = 1024
"""Largest number of samples examined; if the first step has more, exactly that step is examined."""

UNBROKEN = 100
"""Mean document length in samples above which a corpus seems to have lost its document ends."""


@dataclass(frozen=True, slots=True)
class DocumentStatistics:
    """The document lengths in some steps, grouped by data-parallel rank.

    Attributes:
        seq_length: s, input tokens per sample.
        steps: steps[step][dp rank] lists the rank's document lengths in input tokens, sample after sample; each sample's lengths
            add up to s.
    """

    seq_length: int
    steps: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_samples(self) -> int:
        """Number of samples in `steps`, over all steps and dp ranks."""
        return sum(length for step in self.steps for rank in step for length in rank) // self.seq_length

    @property
    def per_sample(self) -> float:
        """Mean number of documents per sample, including partial documents."""
        lengths = [length for step in self.steps for rank in step for length in rank]
        return len(lengths) * self.seq_length / sum(lengths)

    def rows(self) -> list[tuple[int, ...]]:
        """List each sample's document lengths, ordered by step, then by rank, then in training order."""
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
        """Compute the mean number of keys that a query sees within its document."""
        lengths = [length for step in self.steps for rank in step for length in rank]
        return sum(keys_of(length, window) for length in lengths) / sum(lengths)

    def imbalance(self, window: int | None) -> float:
        """Compute the busiest dp rank's (query, key) pairs divided by the mean over dp ranks.

        The result is averaged over steps and is at least 1.
        """
        keys = [[sum(keys_of(length, window) for length in rank) for rank in step] for step in self.steps]
        return fmean(max(ranks) / fmean(ranks) for ranks in keys)


def one_document_per_sample(seq_length: int) -> DocumentStatistics:
    """Build statistics in which each sample is one document, for attention across documents."""
    return DocumentStatistics(seq_length, (((seq_length,),),))


def measure_documents(
    source: SampleSource, *, seq_length: int, global_batch_size: int, micro_batch_size: int, dp: int
) -> DocumentStatistics:
    """Measure the document lengths in the first max(1, MOST_SAMPLES // global_batch_size) steps.

    The result covers all dp ranks, and every rank gets the same one.

    Raises:
        DataError: the corpus index cannot be read.
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
