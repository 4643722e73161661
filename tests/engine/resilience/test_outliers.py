"""Updates that are left out because a loss or gradient norm is far above the last ones: in all layouts, and after a resume."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from tests.engine.resilience.runs import Trace, run
from tests.harness import run_ranks
from tests.parity.cases import Case
from triaxis.engine.checkpoint.format.manifest import read_manifest
from triaxis.engine.step import Engine
from triaxis.engine.step_result import BatchLosses

pytestmark = pytest.mark.distributed

CASE = Case("llama", num_layers=2)
TP = Case("llama", num_layers=2, tp=2)
BATCH, NUM_STEPS, CUT, WINDOW = CASE.global_batch_size, 12, 8, 6
IN_LOSS, IN_GRADIENT = 7, 9
"""Steps with a spike: a saved step lies between them."""
GOOD = [step for step in range(NUM_STEPS) if step not in (IN_LOSS, IN_GRADIENT)]


@dataclass(frozen=True)
class Spikes:
    """Steps whose loss sum gets `more`, once, and steps whose whole gradient is multiplied by `factor`, on all ranks."""

    in_loss: tuple[int, ...] = (IN_LOSS,)
    in_gradient: tuple[int, ...] = (IN_GRADIENT,)
    more: float = 300.0
    factor: float = 50.0

    def into(self, engine: Engine) -> None:
        forward_backward = engine.forward_backward

        @wraps(forward_backward)
        def spoiled(microbatches: Sequence[Any], **named: Any) -> BatchLosses:
            losses = forward_backward(microbatches, **named)
            step = microbatches[0].sample_ids[0] // BATCH
            has_losses, is_first = bool(losses.sums[0] > 0), engine.topology.axis("dp").index == 0
            if step in self.in_loss and has_losses and is_first:
                losses.sums[0] += self.more
            for owned in engine.optimizer.trained if step in self.in_gradient else ():
                owned.grads.mul_(self.factor)
            return losses

        engine.forward_backward = spoiled  # type: ignore[method-assign]


def sections(num_steps: int = NUM_STEPS, **changed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "train": {"steps": num_steps},
        "optimizer": {"decay_steps": NUM_STEPS},
        "resilience": {"skip_above_deviations": 30.0, "skip_window": WINDOW},
        "checkpoint": {"interval": CUT, "keep_last": None},
    } | changed


def check(traces: list[Trace], first: int) -> None:
    """The steps that a run from step `first` on has left out, and what it remembers of the others."""
    for trace in traces:
        assert trace.error == ""
        left_out = [step for step in (IN_LOSS, IN_GRADIENT) if step >= first]
        assert [(kind, step) for kind, step, *_ in trace.events] == [("outlier", step) for step in left_out]
        assert trace.num_updates == len(GOOD)
        for kept in (trace.history.losses, trace.history.grad_norms):
            assert [step for step, _ in kept] == GOOD[-WINDOW - 1 :]


def again(source: Path, folder: Path) -> str:
    """Copy a run without what it has saved after `CUT`."""
    shutil.copytree(source, folder)
    shutil.rmtree(folder / f"step_{NUM_STEPS:08d}")
    (folder / "latest").write_text(f"step_{CUT:08d}\n")
    return str(folder)


def test_spikes_are_left_out_and_do_not_enter_the_mean_and_a_resume_in_another_layout_sees_the_same(
    tmp_path: Path,
) -> None:
    straight: list[Trace] = run_ranks(run, 1, CASE, str(tmp_path / "straight"), sections(), Spikes())
    check(straight, 0)
    (of_loss, of_gradient) = (message for _, _, message, _ in straight[0].events)
    assert f"step {IN_LOSS + 1} on samples {IN_LOSS * BATCH} to {(IN_LOSS + 1) * BATCH - 1}: loss " in of_loss
    assert " is above " in of_loss and "gradient norm" not in of_loss and "Its update is skipped." in of_loss
    assert "gradient norm " in of_gradient and ": loss" not in of_gradient
    state = read_manifest(tmp_path / "straight" / f"step_{CUT:08d}").state
    assert [step for step, _ in state.recent_grad_norms] == [step for step, _ in state.recent_losses] == list(range(7))
    resumed: list[Trace] = run_ranks(run, 2, TP, again(tmp_path / "straight", tmp_path / "tp"), sections(), Spikes(), 1)
    check(resumed, CUT)
    for trace in resumed:
        told = [loss for _, loss in straight[0].told[CUT:]]
        assert [loss for _, loss in trace.told] == pytest.approx(told, rel=1e-9, abs=0)
        numbers = [number for _, number in trace.history.grad_norms]
        wanted = [number for _, number in straight[0].history.grad_norms]
        assert numbers == pytest.approx(wanted, rel=1e-9, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case("llama", num_layers=2, pp=2, dp=2), Case("deepseek", num_layers=2, dp=2, ep=2)], ids=str
)
def test_every_layout_leaves_the_same_steps_out(case: Case, tmp_path: Path) -> None:
    one = Case(case.model, num_layers=2)
    alone: list[Trace] = run_ranks(run, 1, one, str(tmp_path / "one"), sections(), Spikes())
    traces: list[Trace] = run_ranks(run, case.world_size, case, str(tmp_path / "many"), sections(), Spikes())
    check([*alone, *traces], 0)
    for trace in traces:
        assert [loss for _, loss in trace.told] == pytest.approx([loss for _, loss in alone[0].told], rel=1e-9, abs=0)


@pytest.mark.slow
def test_the_run_is_the_one_without_these_updates_and_resumes_to_the_bit(tmp_path: Path) -> None:
    spiked: list[Trace] = run_ranks(run, 1, CASE, str(tmp_path / "spiked"), sections(), Spikes())
    resumed: list[Trace] = run_ranks(
        run, 1, CASE, again(tmp_path / "spiked", tmp_path / "again"), sections(), Spikes(), 1
    )
    check(resumed, CUT)
    assert (resumed[0].told, resumed[0].fingerprint) == (spiked[0].told[CUT:], spiked[0].fingerprint)
    changed = sections(resilience={"on_nonfinite": "skip"})
    nan = Spikes((IN_LOSS, IN_GRADIENT), (), more=math.nan)
    without: list[Trace] = run_ranks(run, 1, CASE, str(tmp_path / "nan"), changed, nan)
    assert [kind for kind, *_ in without[0].events] == ["non_finite"] * 2
    assert without[0].fingerprint == spiked[0].fingerprint


@pytest.mark.slow
def test_the_scale_of_an_fp16_run_stays_where_an_update_is_left_out(tmp_path: Path) -> None:
    case = Case("llama", num_layers=2, dtype="fp16")
    precision = {"dtype": "fp16", "loss_scale": {"initial": 64.0, "window": 5}}
    traces: list[Trace] = run_ranks(run, 1, case, str(tmp_path), sections(precision=precision), Spikes())
    check(traces, 0)
    # It doubles after five updates, and after five more: two steps later than without the spikes.
    assert [scale for scale, _ in traces[0].scales] == [64.0] * 5 + [128.0] * 7
    state = read_manifest(tmp_path / f"step_{NUM_STEPS:08d}").state
    assert state.loss_scale is not None and (state.loss_scale.scale, state.loss_scale.updates) == (256.0, 0)


@pytest.mark.slow
def test_outliers_without_end_stop_the_run(tmp_path: Path) -> None:
    resilience = sections()["resilience"] | {"max_skips_in_a_row": 2}
    later = tuple(range(IN_LOSS, NUM_STEPS))
    (trace,) = run_ranks(run, 1, CASE, str(tmp_path), sections(resilience=resilience), Spikes(later, ()))
    assert "2 updates in a row were skipped before (resilience.max_skips_in_a_row)" in trace.error
    assert trace.exit_code == 6 and [step for _, step, *_ in trace.events] == [IN_LOSS, IN_LOSS + 1, IN_LOSS + 2]
