"""The matrix: every two features meet, all layouts are legal, and all of them are equal to one process."""

from collections.abc import Hashable
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.documented import ROOT
from tests.verify.trials import run
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.launch.verify.covering import Row, covering_rows, pairs
from triaxis.launch.verify.matrix import FAMILIES, WAYS_OF_EXPERTS, matrix

FEATURES: dict[str, tuple[Hashable, ...]] = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (0, 1, 2, 3)}
TRIALS = matrix(None, (), num_steps=2, dtype="float64")


@settings(deadline=None)
@given(st.sets(st.tuples(*(st.sampled_from(choices) for choices in FEATURES.values())), max_size=40))
def test_every_legal_pair_is_in_a_row(forbidden: set[tuple[Hashable, ...]]) -> None:
    def is_legal(row: Row) -> bool:
        return tuple(row.values()) not in forbidden

    rows = covering_rows(FEATURES, is_legal)
    assert all(is_legal(row) for row in rows)
    possible = [dict(zip(FEATURES, values, strict=True)) for values in product(*FEATURES.values())]
    wanted = {pair for row in possible if is_legal(row) for pair in pairs(row)}
    assert {pair for row in rows for pair in pairs(row)} == wanted


def test_without_a_legal_row_there_is_none() -> None:
    assert covering_rows(FEATURES, lambda row: False) == []


def test_the_built_in_matrix_has_everything_and_stays_small() -> None:
    assert {row["model"] for row, _ in TRIALS} == set(FAMILIES)
    assert {row["recompute"] for row, _ in TRIALS} == {"full", "selective", "none"}
    sizes = [parallel_sizes(asked.config) for _, asked in TRIALS]
    assert all(1 < one.world_size <= 8 for one in sizes)
    assert {one.tp for one in sizes} == {1, 2, 4, 8} and {one.pp for one in sizes} == {1, 2, 4}
    assert {one.cp for one in sizes} == {1, 2, 4}
    assert {row["cp method"] for row, _ in TRIALS if row["cp"] != 1} == {"all_gather", "ulysses"}
    assert {row["experts"] for row, _ in TRIALS} == set(WAYS_OF_EXPERTS)
    assert len(TRIALS) == 50, "docs/verify.md has the number"


def test_a_config_has_a_matrix_of_its_own() -> None:
    trials = matrix(ROOT / "configs" / "gpt_tiny.yaml", (), num_steps=1, dtype="fp32", most_ranks=4)
    assert {row["model"] for row, _ in trials} == {"own"}
    assert all(parallel_sizes(asked.config).world_size <= 4 for _, asked in trials)
    assert all(asked.config.precision.dtype == "fp32" for _, asked in trials)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("number", range(len(TRIALS)))
def test_no_false_alarm(number: int, references: Path) -> None:
    row, asked = TRIALS[number]
    verdict = run(asked, references)
    assert verdict.equal, (row, verdict.differences[:3], verdict.cause)
