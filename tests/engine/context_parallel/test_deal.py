"""The deal of a row's tokens to context-parallel ranks: equal counts, balanced work, and head and tail of one document."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.context_parallel.cut import ContextCut
from triaxis.engine.context_parallel.deal import block_work, deal, keys_seen, rank_work, runs_of_ranks
from triaxis.engine.data.documents import Documents, document_positions
from triaxis.engine.data.loader import MicroBatch
from triaxis.engine.data.sequence_part import SequencePart

DOCUMENTS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
SIZES = st.sampled_from([2, 3, 4])


def whole_row(lengths: list[int], size: int) -> list[int]:
    """The documents and one more, so that the row can be cut."""
    unit = 2 * size
    return [*lengths, -sum(lengths) % unit or unit]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_one_document_is_dealt_by_head_and_tail(size: int) -> None:
    """Blocks r and 2 c - 1 - r, and the same number of keys on every rank: l^2 (2 c - 1) + l (l + 1) (2407.21783)."""
    length = 5
    runs = runs_of_ranks([2 * size * length], size, {None: 1})
    for rank, mine in enumerate(runs):
        blocks = (rank, 2 * size - 1 - rank)
        covered = [position for start, stop in mine for position in range(start, stop)]
        assert covered == [position for block in blocks for position in range(block * length, (block + 1) * length)]
    work = rank_work([2 * size * length], size, {None: 1})
    assert set(work) == {length**2 * (2 * size - 1) + length * (length + 1)}


@given(DOCUMENTS, SIZES, st.none() | st.integers(1, 30))
def test_every_token_is_dealt_once_and_ranks_have_equally_many(
    lengths: list[int], size: int, window: int | None
) -> None:
    row = whole_row(lengths, size)
    runs = runs_of_ranks(row, size, {window: 2, None: 1})
    dealt = [position for mine in runs for start, stop in mine for position in range(start, stop)]
    assert sorted(dealt) == list(range(sum(row)))
    assert {sum(stop - start for start, stop in mine) for mine in runs} == {sum(row) // size}
    assert all(before[1] < after[0] for mine in runs for before, after in pairwise(mine))


@given(DOCUMENTS, st.none() | st.integers(1, 30))
def test_the_work_of_a_block_is_the_keys_that_its_queries_see(lengths: list[int], window: int | None) -> None:
    row = whole_row(lengths, 4)
    length = sum(row) // 8
    positions = [position for document in row for position in range(document)]
    seen = [min(position + 1, window or position + 1) for position in positions]
    expected = [sum(seen[start : start + length]) for start in range(0, sum(row), length)]
    assert block_work(row, length, {window: 1}) == expected
    assert sum(keys_seen(document, window) for document in row) == sum(expected)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), SIZES)
def test_no_rank_has_more_than_another_by_more_than_a_round_of_blocks(work: list[int], size: int) -> None:
    """Equal counts: sorted by weight, each rank gets one of every `size` blocks that follow each other."""
    work = work * size
    hands = deal(work, size)
    totals = [sum(work[block] for block in hand) for hand in hands]
    assert max(totals) - min(totals) <= max(work) - min(work)


def batch_of(rows: list[list[int]]) -> MicroBatch:
    shape = (len(rows), sum(rows[0]))
    tokens = torch.arange(shape[0] * shape[1]).view(shape)
    positions = torch.stack([torch.from_numpy(document_positions(row)) for row in rows])
    mask = tokens % 3 > 0
    return MicroBatch(tokens, tokens + 1, mask, positions, [*range(shape[0])], int(mask.sum()), Documents.of(rows))


def test_parts_are_cut_after_labels_were_shifted_and_are_the_whole_together() -> None:
    rows, size = [[3, 9, 4], [16]], 2
    whole = batch_of(rows)
    parts = [ContextCut(size, rank, {None: 1})(whole) for rank in range(size)]
    assert sum(part.num_tokens for part in parts) == whole.num_tokens
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        values = getattr(whole, name)
        gathered = torch.stack([getattr(part, name).t() for part in parts]).reshape(-1)
        assert parts[0].part is not None
        assert torch.equal(gathered[parts[0].part.to_rows].view(values.t().shape), values.t())
        assert torch.equal(values.t().reshape(-1)[parts[0].part.to_parts], gathered)
    for part in parts:
        assert torch.equal(part.labels, part.tokens + 1) and part.documents is whole.documents


def test_one_rank_has_the_whole_batch() -> None:
    whole = batch_of([[16]])
    assert ContextCut(1, 0, {None: 1})(whole) is whole


def test_a_varlen_kernel_gets_the_documents_of_a_run() -> None:
    """Queries 2 to 6 and 12 to 16 of documents of 3, 9 and 4 tokens."""
    part = SequencePart.of([[((2, 6), (12, 16)), ((0, 2), (6, 12))]], 0, [[3, 9, 4]])
    first, second = part.stretches
    assert (first.row, first.queries, first.keys, first.longest) == (0, (0, 4), (0, 6), (3, 3))
    assert first.boundaries is not None and second.boundaries is not None
    assert [each.tolist() for each in first.boundaries] == [[0, 1, 4], [0, 3, 6]]
    assert (second.queries, second.keys, second.longest) == ((4, 8), (12, 16), (4, 4))
    assert [each.tolist() for each in second.boundaries] == [[0, 4], [0, 4]]


def test_rows_of_one_document_are_one_call_for_all() -> None:
    part = SequencePart.of([runs_of_ranks([16], 2, {None: 1})] * 3, 1, [[16]] * 3)
    (stretch,) = part.stretches
    assert (stretch.row, stretch.queries, stretch.keys, stretch.boundaries) == (None, (0, 8), (0, 12), None)
