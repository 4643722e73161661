"""Each planted bug is found, by the parameter or place that goes wrong first and the axis, and nothing else is blamed."""

import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.config import Config, parallel_sizes
from engine.config_load import to_yaml
from engine.rank_grid import RankGrid
from engine.topology import Topology
from engine.verify.judge import Verdict, judge
from launch.verify import Trial, evidence, trial
from tests.harness import run_ranks
from tests.parity.cases import Case
from tests.verify.planted import BUGS, FULL, Bug

pytestmark = pytest.mark.distributed
NUM_STEPS = 2


def observe(rank: int, config: Config, folder: str, is_reference: bool, bug: int | None) -> None:
    """What a rank of `triaxis verify` does, with a bug in it."""
    from launch import verify_rank

    if bug is not None:
        BUGS[bug].plant()
    grid = RankGrid(parallel_sizes(config))
    topology = Topology(grid, rank, torch.device("cpu"), kv_heads=config.model.kv_heads)
    verify_rank.observe(topology, config, Path(folder), is_reference=is_reference)


def trial_of(case: Case, dtype: str, *, small: bool = False) -> Trial:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.yaml"
        path.write_text(to_yaml(case.config()))
        return trial(path, (), small=small, num_steps=NUM_STEPS, dtype=dtype)


def run(asked: Trial, bug: int | None) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="triaxis-test-") as folder:
        run_ranks(observe, 1, asked.reference, folder, True, None)
        run_ranks(observe, parallel_sizes(asked.config).world_size, asked.config, folder, False, bug)
        return judge(evidence(asked.config, Path(folder)), asked.tolerance)


@cache
def sound(case: Case, dtype: str) -> Verdict:
    return run(trial_of(case, dtype), None)


IN_CI = {"gradient": 0, "output": 3, "master": 7, "gradient norm": 8, "parameter": 13}
"""One bug of each kind that can differ first, by its number; all of them with `--all`."""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=str(bug), marks=() if number in IN_CI.values() else pytest.mark.slow)
        for number, bug in enumerate(BUGS)
    ],
)
def test_a_planted_bug_is_named(number: int) -> None:
    bug: Bug = BUGS[number]
    verdict = run(trial_of(bug.case, bug.dtype), number)
    assert not verdict.equal and verdict.cause is not None
    first, *_ = verdict.differences
    assert first.what == bug.what, verdict
    if bug.what == "output":
        assert bug.names(first.name), verdict.differences
    else:
        assert all(bug.names(one.name) for one in verdict.differences), verdict.differences
    assert verdict.cause.axis == bug.axis and bug.text in verdict.cause.text, verdict.cause


def test_ci_has_a_bug_of_each_kind() -> None:
    assert {what: BUGS[number].what for what, number in IN_CI.items()} == {what: what for what in IN_CI}
    assert set(IN_CI) == {bug.what for bug in BUGS}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=() if case == FULL else pytest.mark.slow, id=f"{case}-{dtype}")
        for case, dtype in sorted({(bug.case, bug.dtype) for bug in BUGS}, key=str)
    ],
)
def test_without_the_bug_nothing_differs(case: Case, dtype: str) -> None:
    verdict = sound(case, dtype)
    assert verdict.equal, verdict.differences[:3]
