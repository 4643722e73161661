"""Provide a verification's training data, from random tokens or from a corpus."""

from triaxis.engine.config.schema.model import LARGEST_VOCABULARY
from triaxis.engine.config.tree import Config
from triaxis.engine.data.datasets import open_datasets
from triaxis.engine.data.samples import Sample, SampleSource
from triaxis.engine.data.synthetic import SyntheticDataset

MASKED_FRACTION = 0.3
"""Share of labels that are masked, so that microbatches have unequal counts."""


def masked_samples(config: Config) -> SampleSource:
    """Open the run's random samples or its corpus, with some labels masked.

    Raises:
        DataError: the corpus in `data.train` cannot be read.
    """
    model, train = config.model, config.train
    random = SyntheticDataset(
        train.seed,
        model.vocab_size,
        model.seq_length,
        MASKED_FRACTION,
        mean_document_length=config.data.synthetic_document_length,
        count_document_starts=config.data.count_document_starts,
    )
    if config.data.synthetic:
        return random
    # A small model has fewer ids than a user's corpus.
    most = model.vocab_size if config.model.extension is None else LARGEST_VOCABULARY
    corpus = open_datasets(config.data, model.seq_length, train.seed, vocab_size=most, own=model.own).train
    return MaskedSamples(corpus, random, model.vocab_size)


class MaskedSamples:
    """Samples whose tokens come from `tokens`, modulo `num_ids`.

    A label counts only if it counts in `tokens` and in `masks`.
    """

    def __init__(self, tokens: SampleSource, masks: SampleSource, num_ids: int) -> None:
        self._tokens, self._masks, self._num_ids = tokens, masks, num_ids

    def __getitem__(self, sample_id: int) -> Sample:
        sample = self._tokens[sample_id]
        masked = sample.loss_mask & self._masks[sample_id].loss_mask
        return sample._replace(tokens=sample.tokens % self._num_ids, loss_mask=masked)

    def lengths(self, sample_id: int) -> tuple[int, ...]:
        return self._tokens.lengths(sample_id)
