"""Documents of a microbatch: boundaries, numbers and positions from lengths alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.data.documents import FEWEST_BOUNDARIES, Documents, document_positions


def test_boundaries_numbers_and_positions() -> None:
    documents = Documents.of([(3, 1, 2), (6,)])
    assert documents.boundaries[:5].tolist() == [0, 3, 4, 6, 12]
    assert set(documents.boundaries[5:].tolist()) == {12}
    assert documents.numbers.tolist() == [[0, 0, 0, 1, 2, 2], [0] * 6]
    assert documents.longest == 6
    assert document_positions((3, 1, 2)).tolist() == [0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize(("lengths", "expected"), [([(4,), (4,)], True), ([(4,), (3, 1)], False)])
def test_one_document_per_row(lengths: list[tuple[int, ...]], expected: bool) -> None:
    assert Documents.of(lengths).is_one_per_row is expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=200))
def test_tensors_agree_with_lengths(lengths: list[int]) -> None:
    documents = Documents.of([lengths])
    starts = documents.boundaries.unique_consecutive()
    assert starts.diff().tolist() == lengths
    assert len(documents.boundaries) == max(FEWEST_BOUNDARIES, 2 ** len(lengths).bit_length())
    changes = documents.numbers[0].diff(prepend=torch.tensor([-1]))
    assert changes.nonzero().flatten().tolist() == starts[:-1].tolist()


def test_documents_that_the_host_does_not_know_have_the_bounds_of_a_row() -> None:
    unread = Documents.of([(4,), (4,)]).unread()
    assert unread.longest == 4 and not unread.is_one_per_row
    with pytest.raises(RuntimeError, match="the host reads documents' lengths"):
        _ = unread.lengths
