"""Bounds of errors: a constant, or a multiple of the rounding that one process shows."""

import math
from dataclasses import replace

import pytest

from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.launch.verify.verdict.bounds import DRAWS
from triaxis.launch.verify.verdict.deviation import Deviation
from triaxis.launch.verify.verdict.evidence import Evidence
from triaxis.launch.verify.verdict.judge import OTHER_CONTENTS, Verdict, judge
from triaxis.launch.verify.verdict.records import (
    ParameterFacts,
    RankReport,
    SiteReport,
    StepFacts,
    TensorKind,
    TensorReport,
)

KINDS: tuple[TensorKind, ...] = ("start", "gradient", "master", "exp_avg", "exp_avg_sq", "parameter")
NAMES = ("a", "b")
FACTS = StepFacts(3.0, 1.0, 8)
NOISE = 1e-3


def off(error: float) -> Deviation:
    """Return a tensor of norm 1 with an error of this norm."""
    return Deviation(1.0, 1.0 + error**2, 1.0, error**2)


def report(errors: dict[tuple[str, str], float], facts: StepFacts = FACTS, *, dp: int = 0) -> RankReport:
    """Return one rank's report of one step; errors that are not given are 0."""
    return RankReport(
        dp,
        {"pp": 0, "dp": dp, "cp": 0, "tp": 0},
        (facts,),
        tuple(TensorReport(0, kind, name, off(errors.get((kind, name), 0.0))) for kind in KINDS for name in NAMES),
        (SiteReport(0, "token_losses", off(errors.get(("output", "token_losses"), 0.0))),),
        (((dp, 7),),),
        {"edp": dp, "ep": 0, "etp": 0},
    )


ROUNDING = {(kind, name): NOISE for kind in KINDS[1:] for name in NAMES} | {("output", "token_losses"): NOISE}


def verdict(rank: RankReport, *, tp: int = 1, noise: dict[tuple[str, str], float] = ROUNDING) -> Verdict:
    parameters = tuple(ParameterFacts(name, True, 0) for name in NAMES)
    evidence = Evidence(ParallelSizes(tp=tp), parameters, (FACTS,), (rank,), (((0, 7),),), report(noise))
    return judge(evidence, None)


@pytest.mark.parametrize("what", ["gradient", "master", "parameter"])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_bound_is_a_multiple_of_the_rounding(what: str, tp: int) -> None:
    bound = DRAWS * math.sqrt(2 + tp / 2) * NOISE
    inside, outside = (verdict(report({(what, "b"): bound * part}), tp=tp) for part in (0.99, 1.01))
    assert inside.equal and inside.of_bound == pytest.approx(0.99)
    assert [(one.what, one.name) for one in outside.differences] == [(what, "b")]


@pytest.mark.parametrize(("what", "power"), [("exp_avg", 1), ("exp_avg_sq", 2)])
def test_a_moment_may_have_the_rounding_of_its_gradients(what: str, power: int) -> None:
    """The noise run rounds the moments by luck: its error lies where the gradient is small."""
    exact_moments = {key: error for key, error in ROUNDING.items() if key[0] not in ("exp_avg", "exp_avg_sq")}
    bound = power * DRAWS * math.sqrt(2.5) * NOISE
    for part, is_equal in ((0.99, True), (1.01, False)):
        assert verdict(report({(what, "b"): bound * part}), noise=exact_moments).equal == is_equal


def test_starts_are_equal_to_the_bit() -> None:
    assert [one.what for one in verdict(report({("start", "a"): 1e-12})).differences] == ["start"]


def test_a_loss_that_is_right_by_luck_has_a_bound() -> None:
    """The noise run has the very same loss; that of its token losses is the bound."""
    assert verdict(report({}, replace(FACTS, loss=FACTS.loss * (1 + NOISE)))).equal
    assert not verdict(report({}, replace(FACTS, loss=FACTS.loss * (1 + 6 * NOISE)))).equal
    assert not verdict(report({}, replace(FACTS, loss=math.nan))).equal
    assert not verdict(report({}, replace(FACTS, grad_norm=FACTS.grad_norm * (1 + 6 * NOISE)))).equal


def test_a_sample_that_is_read_twice_is_named() -> None:
    two = tuple(replace(report({}, dp=dp), samples=(((0, 7),),)) for dp in (0, 1))
    wanted = (((0, 7), (1, 7)),)
    parameters = tuple(ParameterFacts(name, True, 0) for name in NAMES)
    found = judge(Evidence(ParallelSizes(dp=2), parameters, (FACTS,), two, wanted), 1e-9)
    assert [(one.what, one.name, one.wanted, one.got) for one in found.differences] == [
        ("samples", "sample 0", 1, 2),
        ("samples", "sample 1", 1, 0),
    ]
    assert found.cause is not None and found.cause.axis == "dp"


def test_other_tokens_of_a_sample_are_named() -> None:
    found = verdict(replace(report({}), samples=(((0, 8),),)))
    assert {one.name for one in found.differences} == {"sample 0", f"{OTHER_CONTENTS} of sample 0"}
