"""Statistics of documents: what the lengths in the index say about the attention work of a step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.config.quantities.stage_work import keys_of
from triaxis.engine.data.document_statistics import DocumentStatistics, measure_documents, one_document_per_sample
from triaxis.engine.data.samples import input_lengths
from triaxis.engine.data.synthetic import SyntheticDataset


@given(st.integers(1, 500), st.none() | st.integers(1, 600))
def test_keys_are_the_sum_over_queries(length: int, window: int | None) -> None:
    """The integral leaves out half a key per query, as s / 2 does in place of (s + 1) / 2; beyond a window it is exact."""
    exact = sum(min(query + 1, window or length) for query in range(length))
    seen = min(length, window or length)
    assert keys_of(length, window) == pytest.approx(exact - seen / 2)


def test_one_document_is_half_of_the_sample() -> None:
    whole = one_document_per_sample(64)
    assert (whole.per_sample, whole.keys_per_query(None), whole.imbalance(None)) == (1, 32, 1)


def test_shares_and_imbalance() -> None:
    statistics = DocumentStatistics(8, (((8,), (4, 4)), ((2,) * 4, (1,) * 8)))
    assert statistics.per_sample == (1 + 2 + 4 + 8) / 4
    keys = [[32, 16], [8, 4]]
    assert statistics.keys_per_query(None) == sum(map(sum, keys)) / 32
    assert statistics.imbalance(None) == (32 / 24 + 8 / 6) / 2


def test_what_is_measured_is_what_ranks_read() -> None:
    source = SyntheticDataset(1, 50, 24, mean_document_length=5)
    found = measure_documents(source, seq_length=24, global_batch_size=8, micro_batch_size=2, dp=2)
    assert len(found.steps) == 128
    first = [input_lengths(source.lengths(sample_id)) for sample_id in range(8)]
    assert sorted(length for rank in found.steps[0] for length in rank) == sorted(sum(first, ()))
    assert 24 / 6 < found.per_sample < 24 / 4
