"""A parameter that a user adds to the list is compared as any other: equal where it is right, named where ranks let it drift."""

from pathlib import Path

import pytest

from tests.documented import ROOT
from tests.harness import run_ranks
from tests.verify.trials import observe
from triaxis.launch.verify.run import evidence, trial
from triaxis.launch.verify.verdict.judge import judge

DRIFTING = Path(__file__).with_name("mistakes") / "drifting.py"


@pytest.mark.distributed
def test_a_listed_parameter_is_equal_and_one_that_drifts_is_named(
    tmp_path: Path,
) -> None:
    layout = [f"parallel.{size}=1" for size in ("pp", "vpp", "dp")]
    words = (
        "parallel.tp=2",
        "parallel.sequence_parallel=true",
        *layout,
        "model.num_layers=2",
        f"model.extension={DRIFTING}",
    )
    asked = trial(ROOT / "configs" / "gpt_tiny.yaml", words, small=True, num_steps=1, dtype="float64")
    run_ranks(observe, 1, asked.reference, str(tmp_path), True)
    run_ranks(observe, 2, asked.config, str(tmp_path), False)
    found = evidence(asked.config, tmp_path)
    scales, sums = ({f"layers.{layer}.mlp.{name}" for layer in range(2)} for name in ("scale", "sum"))
    assert scales < found.tensors[0, "gradient"].keys() and not sums & found.tensors[0, "gradient"].keys()
    verdict = judge(found, asked.tolerance)
    assert {one.what for one in verdict.differences} == {"master"}
    assert {one.name for one in verdict.differences} == sums
