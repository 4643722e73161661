"""Attention work of cp ranks: what kernels compute on each, what is predicted, and equality where rows are one document."""

from collections.abc import Sequence
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.context_parallel.test_deal import batch_of
from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.context_parallel.deal import runs_of_ranks
from triaxis.engine.context_parallel.imbalance import imbalance, predicted_imbalance, work_of_ranks
from triaxis.engine.data.document_statistics import DocumentStatistics
from triaxis.engine.data.documents import Documents
from triaxis.engine.data.sequence_part import SequencePart
from triaxis.engine.kernels.masked_attention import ALL_ROWS, Mask, _stretches

SIZES = st.sampled_from([2, 3, 4])
WINDOWS = st.none() | st.integers(1, 30)
Rows = list[list[int]]


@st.composite
def rows_of(draw: st.DrawFn, size: int) -> Rows:
    """Rows of equal length, which the ranks can share, cut into documents anywhere."""
    s = 2 * size * draw(st.integers(1, 12))
    cuts = st.sets(st.integers(1, s - 1), max_size=6)
    return [
        [stop - start for start, stop in pairwise([0, *sorted(draw(cuts)), s])] for _ in range(draw(st.integers(1, 3)))
    ]


def pairs_by_position(row: Sequence[int], positions: Sequence[int], window: int | None) -> int:
    """Pairs of a query at one of `positions` and a key that it sees, one by one."""
    document = [number for number, length in enumerate(row) for _ in range(length)]
    return sum(
        document[key] == document[query] and (window is None or query - key < window)
        for query in positions
        for key in range(query + 1)
    )


def pairs_of_call(num_queries: int, num_keys: int, window: int | None) -> int:
    """Pairs of a causal kernel that aligns the last query with the last key."""
    seen = range(num_keys - num_queries + 1, num_keys + 1)
    return sum(keys if window is None else min(keys, window) for keys in seen)


def varlen_pairs(part: SequencePart, num_rows: int, window: int | None) -> int:
    """Pairs of the calls of a varlen kernel."""
    total = 0
    for stretch in part.stretches:
        if stretch.boundaries is None:
            (start, stop), (first, last) = stretch.queries, stretch.keys
            total += num_rows * pairs_of_call(stop - start, last - first, window)
            continue
        queries, keys = (torch.diff(each).tolist() for each in stretch.boundaries)
        total += sum(pairs_of_call(q, k, window) for q, k in zip(queries, keys, strict=True))
    return total


def blockwise_pairs(part: SequencePart, rows: Rows, window: int | None) -> int:
    """Pairs of the calls of kernels that know no documents."""
    is_one = all(len(row) == 1 for row in rows)
    mask = Mask(window, None if is_one else Documents.of(rows), part)
    num_queries = part.positions.shape[1]
    return sum(
        (len(rows) if each.queries.starts[0][0] == ALL_ROWS else len(each.queries.starts))
        * pairs_of_call(each.queries.length, each.keys.length, window)
        for each in _stretches(mask, num_queries, sum(rows[0]))
    )


@given(data=st.data(), size=SIZES, window=WINDOWS)
def test_the_work_of_a_rank_is_what_its_kernels_compute(data: st.DataObject, size: int, window: int | None) -> None:
    rows = data.draw(rows_of(size))
    runs = [runs_of_ranks(row, size, {window: 3}) for row in rows]
    work = work_of_ranks(rows, size, {window: 3})
    for rank in range(size):
        part = SequencePart.of(runs, rank, rows)
        expected = sum(
            pairs_by_position(row, positions, window)
            for row, positions in zip(rows, part.positions.tolist(), strict=True)
        )
        assert work[rank] == 3 * expected
        assert varlen_pairs(part, len(rows), window) == blockwise_pairs(part, rows, window) == expected


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_kernels_compute_equally_much_on_all_ranks_where_rows_are_one_document(size: int, num_rows: int) -> None:
    s = 2 * size * 5
    rows = [[s]] * num_rows
    parts = [ContextCut(size, rank, {None: 1}).part(rows) for rank in range(size)]
    for pairs in (
        {varlen_pairs(part, num_rows, None) for part in parts if part is not None},
        {blockwise_pairs(part, rows, None) for part in parts if part is not None},
    ):
        assert pairs == {num_rows * s * (s + 1) // 2 // size}


@given(data=st.data(), size=SIZES, window=WINDOWS)
def test_the_predicted_imbalance_is_that_of_pairs_counted_one_by_one(
    data: st.DataObject, size: int, window: int | None
) -> None:
    """Two steps of two replicas with two microbatches each, of the same number of rows."""
    rows = data.draw(rows_of(size))
    others = data.draw(st.permutations(rows))
    microbatches = [rows, others] * 4
    steps = tuple(tuple(tuple(chain(*rows, *others)) for _ in range(2)) for _ in range(2))
    statistics = DocumentStatistics(sum(rows[0]), steps)
    assert statistics.rows() == [tuple(row) for each in microbatches for row in each]

    counted = []
    for each in microbatches:
        runs = [runs_of_ranks(row, size, {window: 1}) for row in each]
        parts = [SequencePart.of(runs, rank, each) for rank in range(size)]
        counted.append(
            [
                sum(
                    pairs_by_position(row, mine, window)
                    for row, mine in zip(each, part.positions.tolist(), strict=True)
                )
                for part in parts
            ]
        )
    expected = sum(map(max, counted)) / (sum(map(sum, counted)) / size)
    assert predicted_imbalance(statistics, len(rows), size, {window: 1}) == pytest.approx(expected, rel=1e-12)
    assert expected >= 1


def test_a_microbatch_waits_for_its_fullest_rank() -> None:
    """Two microbatches that are each unequal, the other way round: no rank has more in all, and both are waited for."""
    assert imbalance([(3, 1), (1, 3)]) == 1.5
    assert imbalance([(2, 2), (5, 5)]) == 1.0
    assert imbalance([(4, 0)]) == 2.0


def test_a_cut_microbatch_has_the_work_of_all_ranks() -> None:
    rows = [[3, 9, 4], [16]]
    parts = [ContextCut(2, rank, {None: 2})(batch_of(rows)) for rank in range(2)]
    assert parts[0].rank_work == parts[1].rank_work == work_of_ranks(rows, 2, {None: 2})
    assert parts[0].rank_work is not None and sum(parts[0].rank_work) == 2 * (6 + 45 + 10 + 136)
