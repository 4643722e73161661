"""Right layouts are equal to one process, whatever the dtype: no false alarm in random ones."""

from pathlib import Path

import pytest

from tests.verify.random_layouts import random_trial
from tests.verify.trials import run

DTYPES = ("float64", "fp32", "bf16")
NUM_LAYOUTS = 200
IN_CI = (75, 1)
"""Numbers of layouts of at most 4 ranks that run soon: tp and cp in float64, zbv in fp32."""
TP_AND_PP, CUTS_EXPERTS = 161, 198
"""A number whose layout has tp and pp, in bf16, and one with ep 2, in float64."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "number", [*IN_CI, *(pytest.param(number, marks=pytest.mark.slow) for number in (TP_AND_PP, CUTS_EXPERTS))]
)
def test_no_false_alarm_in_small_layouts(number: int, references: Path) -> None:
    asked = random_trial(number, DTYPES[number % len(DTYPES)], most_ranks=4)
    verdict = run(asked, references, sub_layouts=False)
    assert verdict.equal, (asked.config.parallel, verdict.differences[:3], verdict.of_bound)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("number", range(8))
def test_no_false_alarm_in_small_layouts_of_fp16(number: int, references: Path) -> None:
    verdict = run(random_trial(number, "fp16", most_ranks=4), references, sub_layouts=False)
    assert verdict.equal, (verdict.differences[:3], verdict.of_bound)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("number", range(NUM_LAYOUTS))
def test_no_false_alarm(number: int, references: Path) -> None:
    asked = random_trial(number, DTYPES[number % len(DTYPES)])
    verdict = run(asked, references, sub_layouts=False)
    assert verdict.equal, (asked.config.parallel, verdict.differences[:3], verdict.of_bound)
