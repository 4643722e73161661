"""Count documents and tokens in a corpus, for `triaxis data inspect`."""

from dataclasses import dataclass

import numpy as np

from triaxis.engine.data.corpus.indexed import IndexedTokens

QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
MOST_DOCUMENTS = 2**22
"""Most documents that are examined; if a corpus has more, evenly spaced ones are."""


@dataclass(frozen=True, slots=True)
class CorpusCounts:
    """A corpus's counts.

    Attributes:
        documents, sequences, tokens: counts in the whole corpus.
        dtype: numpy name of the token dtype.
        looked_at: number of documents examined; the attributes below describe only these.
        quantiles: document length in tokens at each of QUANTILES, by name, such as "50%".
        without_tokens: number of empty documents.
        without_end: number of non-empty documents whose last token is not the end-of-document id; None: that id is unknown.
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
        """Mean tokens per document."""
        return self.tokens / self.documents


def describe(corpus: IndexedTokens, eod_id: int | None) -> CorpusCounts:
    """Count a corpus's documents and tokens.

    Lengths and final tokens are examined in at most MOST_DOCUMENTS documents, evenly spaced.
    """
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
