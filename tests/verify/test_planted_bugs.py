"""Each planted bug is found, by the parameter or place that goes wrong first and the axis, and nothing else is blamed."""

import tempfile
from pathlib import Path

import pytest

from engine.config_load import to_yaml
from launch.verify import Trial, trial
from tests.parity.cases import Case
from tests.verify.planted import BUGS, DOWN, Bug
from tests.verify.trials import run

pytestmark = pytest.mark.distributed
NUM_STEPS = 2


def trial_of(case: Case, dtype: str) -> Trial:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.yaml"
        path.write_text(to_yaml(case.config()))
        return trial(path, (), small=False, num_steps=NUM_STEPS, dtype=dtype)


IN_CI = {"gradient": 0, "output": 1, "master": 2, "gradient norm": 3, "parameter": 4, "samples": 5, "start": 6}
"""One bug of each kind that can differ first, by its number; all of them with `--all`."""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=str(bug), marks=() if number in IN_CI.values() else pytest.mark.slow)
        for number, bug in enumerate(BUGS)
    ],
)
def test_a_planted_bug_is_named(number: int, references: Path) -> None:
    bug: Bug = BUGS[number]
    verdict = run(trial_of(bug.case, bug.dtype), references, bug.plant)
    assert not verdict.equal and verdict.cause is not None
    first, *_ = verdict.differences
    assert first.what == bug.what, verdict
    if bug.what == "output":
        assert bug.names(first.name), verdict.differences
    else:
        assert all(bug.names(one.name) for one in verdict.differences), verdict.differences
    assert verdict.cause.axis == bug.axis and bug.text in verdict.cause.text, verdict.cause


def test_axes_are_named_and_right() -> None:
    """Each bug's own test shows that `axis` is what is named; here: how often one is, and how often it is right."""
    on_one = [bug for bug in BUGS if bug.axes]
    named = [bug for bug in on_one if bug.axis is not None]
    assert len(BUGS) >= 40 and len(named) >= 0.7 * len(on_one)
    assert sum(bug.axis in bug.axes for bug in named) >= 0.9 * len(named)


def test_ci_has_a_bug_of_each_kind() -> None:
    assert {what: BUGS[number].what for what, number in IN_CI.items()} == {what: what for what in IN_CI}
    assert set(IN_CI) == {bug.what for bug in BUGS}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=() if case == DOWN else pytest.mark.slow, id=f"{case}-{dtype}")
        for case, dtype in sorted({(bug.case, bug.dtype) for bug in BUGS}, key=str)
    ],
)
def test_without_the_bug_nothing_differs(case: Case, dtype: str, references: Path) -> None:
    verdict = run(trial_of(case, dtype), references)
    assert verdict.equal, verdict.differences[:3]
