"""A corpus in numbers, for `triaxis data inspect` (no torch here)."""

from dataclasses import dataclass

import numpy as np

from triaxis.engine.data.corpus.indexed import IndexedTokens

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
MOST_DOCUMENTS = 2**22
"""Documents that are looked at; of a larger corpus as many, evenly spaced."""


@dataclass(frozen=True, slots=True)
class CorpusCounts:
    """Counts of a corpus.

    Attributes:
        documents, sequences, tokens: in the whole corpus.
        dtype: of a token.
        looked_at: documents that the following are about.
        quantiles: tokens of a document at each of QUANTILES.
        without_tokens: documents of no token.
        without_end: documents with tokens whose last one is not `eod_id`; None where that id is not known.
    """

    documents: int
    sequences: int
    tokens: int
    dtype: str
    looked_at: int
    quantiles: dict[str, int]
    without_tokens: int
    without_end: int | None

    @property
    def mean_length(self) -> float:
        """Return the tokens per document."""
        return self.tokens / self.documents


def describe(corpus: IndexedTokens, eod_id: int | None) -> CorpusCounts:
    """Count what is in a corpus."""
    looked_at = min(corpus.num_documents, MOST_DOCUMENTS)
    chosen = np.arange(looked_at) * corpus.num_documents // looked_at
    lengths = corpus.document_lengths(range(corpus.num_documents))[chosen]
    at = np.quantile(lengths, QUANTILES, method="inverted_cdf")
    last = corpus.last_tokens(chosen)
    return CorpusCounts(
        documents=corpus.num_documents,
        sequences=corpus.num_sequences,
        tokens=corpus.num_tokens,
        dtype=corpus.dtype.name,
        looked_at=looked_at,
        quantiles={f"{share:.0%}": int(length) for share, length in zip(QUANTILES, at, strict=True)},
        without_tokens=int((lengths == 0).sum()),
        without_end=None if eod_id is None else int(((lengths > 0) & (last != eod_id)).sum()),
    )
