"""The comparison of trainings with FP8 runs, and every recipe fits its model."""

from pathlib import Path

import pytest

from benchmarks.fp8_learns import PLAIN, RECIPES, Row
from benchmarks.moe_learns import CONFIGS, ONE_RANK
from tests.benchmarks.tiny_trainings import rows_of
from triaxis.engine.config.fp8 import Fp8Config
from triaxis.engine.config.load import load_config

SMALLER = ("train.steps=20", "optimizer.warmup_steps=5", "eval.interval=20", "eval.steps=1")


def test_every_recipe_fits_the_model() -> None:
    found = {name: load_config(CONFIGS / "gpt_tiny.yaml", [*ONE_RANK, *words]) for name, words in RECIPES.items()}
    assert found[PLAIN].precision.fp8 is None
    others = [config.precision.fp8 for name, config in found.items() if name != PLAIN]
    assert {fp8.recipe for fp8 in others if fp8 is not None} == {"tensorwise", "blockwise", "mxfp8"}
    assert Fp8Config(format="e4m3") in others


def test_a_difference_is_that_of_one_seed() -> None:
    plain = Row(PLAIN, {1: 2.0, 2: 3.0})
    assert Row("tensorwise", {2: 3.5, 1: 1.75}).over(plain) == [0.5, -0.25]


@pytest.mark.slow
@pytest.mark.distributed
def test_fp8_learns_what_plain_learns(tmp_path: Path) -> None:
    plain, rounded = rows_of("fp8_learns", tmp_path, ["--only", "tensorwise", "--seeds", "1"], SMALLER)
    assert (plain["name"], rounded["name"]) == (PLAIN, "tensorwise")
    ((seed, loss),) = plain["val_losses"].items()
    # Bytes begin at ln 257 = 5.55; two runs of other bits part by some hundredths.
    assert loss < 4 and rounded["val_losses"][seed] != loss
    assert rounded["val_losses"][seed] == pytest.approx(loss, abs=0.2)
