"""Blends keep their weights to less than a sample, at every length; splits hold back whole documents."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from triaxis.engine.data.blend import MAX_PERIOD, Blend, one_period, shares
from triaxis.engine.data.samples import Sample
from triaxis.engine.data.split import split_documents
from triaxis.engine.errors import DataError


class Numbered:
    """Sample i holds (name, i)."""

    def __init__(self, name: int) -> None:
        self.name = name

    def __getitem__(self, sample_id: int) -> Sample:
        return Sample(np.array([self.name, sample_id]), np.ones(1, np.bool_), (2,))

    def lengths(self, sample_id: int) -> tuple[int, ...]:
        return (2,)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
@example([5, 3, 1, 5, 30, 30, 1])
@example([1, 1, 1])
@example([999, 1])
def test_the_error_is_below_one_sample_at_every_prefix(share: list[int]) -> None:
    table = one_period(share)
    for corpus, part in enumerate(share):
        given_so_far = np.cumsum(table == corpus)
        ideal_times_period = part * np.arange(1, len(table) + 1)
        assert np.all(np.abs(given_so_far * len(table) - ideal_times_period) < len(table))
        assert given_so_far[-1] == part


def test_a_blend_takes_each_corpus_in_order_and_goes_on_for_ever() -> None:
    blend = Blend([Numbered(0), Numbered(1), Numbered(2)], [0.5, 0.3, 0.2])
    next_of = [0, 0, 0]
    for n in range(1005):
        name, inner = blend[n].tokens.tolist()
        assert inner == next_of[name]
        next_of[name] += 1
    for got, weight in zip(next_of, (0.5, 0.3, 0.2), strict=True):
        assert abs(got - 1005 * weight) < 1
    far = 10**15
    assert blend.locate(far) == (blend.locate(0)[0], far // 10 * blend.shares[blend.locate(0)[0]])


def test_decimal_weights_are_taken_at_their_word() -> None:
    assert shares([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert shares([30, 70]) == [3, 7]
    assert shares([5]) == [1]
    assert shares([0.0334, 0.9666]) == [167, 4833]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1e-9, 1e12, allow_nan=False), min_size=1, max_size=12))
def test_other_weights_are_honoured_to_a_hundred_thousandth(weights: list[float]) -> None:
    share = shares(weights)
    assert min(share) >= 1
    for part, weight in zip(share, weights, strict=True):
        assert abs(part / sum(share) - weight / sum(weights)) <= (len(weights) + 1) / MAX_PERIOD


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [-1.0], [float("nan")], [float("inf")]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(AssertionError):
        shares(weights)


def test_one_weight_per_corpus() -> None:
    with pytest.raises(DataError, match="1 corpora and 2 weights"):
        Blend([Numbered(0)], [1, 2])


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 10_000), st.tuples(*[st.floats(1, 100)] * 3))
def test_a_split_is_a_partition_in_file_order(num_documents: int, split: tuple[float, float, float]) -> None:
    try:
        parts = split_documents(num_documents, split, "corpus")
    except DataError:
        assert num_documents * min(split) / sum(split) < 1
        return
    assert [document for part in parts.values() for document in part] == list(range(num_documents))
    for part, weight in zip(parts.values(), split, strict=True):
        assert abs(len(part) - num_documents * weight / sum(split)) <= 1


def test_a_split_says_what_would_be_empty() -> None:
    assert split_documents(100, [98, 2, 0], "c") == {
        "train": range(98),
        "valid": range(98, 100),
        "test": range(100, 100),
    }
    assert split_documents(1, [1, 0, 0], "c")["train"] == range(1)
    with pytest.raises(DataError, match=r"c has 3 documents.*train 3, valid 0, test 0: valid and test would be empty"):
        split_documents(3, [98, 1, 1], "c")
    for wrong in ([1, 2], [0, 1, 0], [1, -1, 0]):
        with pytest.raises(AssertionError):
            split_documents(10, wrong, "c")
