"""Sub-layouts name an axis where one of them alone makes a difference vanish, and none otherwise."""

from collections.abc import Callable

import pytest

from tests.documented import ROOT
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.tree import Config
from triaxis.launch.verify.run import trial
from triaxis.launch.verify.sweep import attributed
from triaxis.launch.verify.verdict.evidence import Difference, Evidence
from triaxis.launch.verify.verdict.judge import Verdict

STEP = 1
VERDICT = Verdict({}, (Difference(STEP, "loss", "", 3.0, 4.0, 0.3, None, 1e-9),), None)


def named(is_equal: Callable[[Config], bool | None]) -> tuple[str | None, str, list[Config]]:
    """Return the axis, the words, and the sub-layouts of gpt_tiny on 8 ranks that were run."""
    config = trial(ROOT / "configs" / "gpt_tiny.yaml", (), small=True, num_steps=3, dtype="float64").config
    run: list[Config] = []

    def watched(smaller: Config) -> bool | None:
        run.append(smaller)
        return is_equal(smaller)

    cause = attributed(config, Evidence(parallel_sizes(config), (), (), ()), VERDICT, watched).cause
    assert cause is not None
    return cause.axis, cause.text, run


@pytest.mark.parametrize(
    ("is_equal", "axis", "said"),
    [
        (
            lambda config: config.parallel.tp == 1,
            "tp",
            "vanishes with tp=1; it stays with pp=1, with dp=1, with sp=false",
        ),
        (lambda config: config.parallel.vpp == 1, "pp", "vanishes with pp=1, with vpp=1"),
        (lambda config: config.parallel.dp == 1, "dp", "vanishes with dp=1; it stays with tp=1, with pp=1"),
        (lambda config: False, None, "stays with tp=1, with pp=1, with dp=1, with one process"),
        (lambda config: parallel_sizes(config).world_size == 1, None, "vanishes with one process"),
        (lambda config: 1 in (config.parallel.tp, config.parallel.dp), None, "vanishes with tp=1, with dp=1"),
        (lambda config: None if config.parallel.tp == 1 else False, None, "unknown (the run failed) with tp=1"),
    ],
)
def test_an_axis_is_named_by_what_vanishes(
    is_equal: Callable[[Config], bool | None], axis: str | None, said: str
) -> None:
    found, text, run = named(is_equal)
    assert (found, said in text) == (axis, True), text
    assert {config.train.steps for config in run} == {STEP + 1}
    assert len({config.train.global_batch_size for config in run}) == 1


def test_what_is_equal_is_not_swept() -> None:
    config = trial(ROOT / "configs" / "gpt_tiny.yaml", (), small=True, num_steps=1, dtype="float64").config
    equal = Verdict({}, (), None)

    def never(smaller: Config) -> bool:
        raise AssertionError("a sub-layout was run")

    assert attributed(config, Evidence(parallel_sizes(config), (), (), ()), equal, never) is equal
