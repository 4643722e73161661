"""A router's bias is state like any other: a skipped step leaves it, and a rollback takes it back."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.resilience.runs import Plant, Trace, run
from tests.engine.resilience.test_policies import BAD_STEP, NUM_STEPS, ROLLBACK, SAVING, few, without_one_update
from tests.harness import run_ranks
from tests.parity.cases import Case

ONE = Case("moe losses", num_layers=2, global_batch_size=8)
CUT = replace(ONE, dp=2, ep=2)
BAD = Plant(rank=0, module="blocks.1.mlp", sample_ids=(BAD_STEP * 8 + 1,))
"""In the first microbatch of two, which is rank 0's in both layouts."""


def check_skip(case: Case, folder: Path) -> None:
    sections = {"train": few(), "resilience": {"on_nonfinite": "skip"}}
    traces: list[Trace] = run_ranks(run, case.world_size, case, str(folder), sections, BAD)
    left_out = run_ranks(without_one_update, case.world_size, case, BAD_STEP, few())
    for trace, (losses, fingerprint) in zip(traces, left_out, strict=True):
        assert trace.error == "" and trace.num_updates == NUM_STEPS - 1
        assert {step: loss for step, loss in trace.told if step != BAD_STEP} == losses
        assert trace.fingerprint == fingerprint


@pytest.mark.distributed
def test_a_skipped_step_moves_no_bias(tmp_path: Path) -> None:
    check_skip(ONE, tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_skipped_step_moves_no_bias_on_any_rank(tmp_path: Path) -> None:
    check_skip(CUT, tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("case", [ONE, pytest.param(CUT, marks=pytest.mark.slow)], ids=str)
def test_a_rollback_takes_the_bias_back(case: Case, tmp_path: Path) -> None:
    always = {"optimizer": {"decay_steps": 50}, "train": few(), "checkpoint": SAVING}
    back: list[Trace] = run_ranks(
        run, case.world_size, case, str(tmp_path / "back"), always | {"resilience": ROLLBACK}, BAD
    )
    skipping = always | {"data": {"skip_samples": [(BAD_STEP * 8, (BAD_STEP + 1) * 8)]}}
    straight: list[Trace] = run_ranks(run, case.world_size, case, str(tmp_path / "straight"), skipping)
    for trace, undisturbed in zip(back, straight, strict=True):
        assert [kind for kind, *_ in trace.events] == ["non_finite", "rolled_back"]
        assert trace.fingerprint == undisturbed.fingerprint
