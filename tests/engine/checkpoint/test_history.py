"""What a run remembers: the limit of a loss, samples that are left out, and where both are written."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.history import MEDIAN_FROM, MEDIAN_OVER, SKIPPED, RunHistory, read_history
from triaxis.engine.config.schema.run import ResilienceConfig
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.errors import CheckpointError
from triaxis.engine.step_limits import NO_LIMITS


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 20.0), min_size=1, max_size=90), st.data())
def test_a_limit_depends_on_the_steps_alone(losses: list[float], data: st.DataObject) -> None:
    """Whether the loss of the step before is known already, and whether the run was resumed in between, changes nothing."""
    step = data.draw(st.integers(1, len(losses)))
    config = ResilienceConfig(
        loss_spike=2.0, skip_above_deviations=3.0, skip_window=data.draw(st.sampled_from([4, 7, 128]))
    )
    late, early, resumed = RunHistory(), RunHistory(), RunHistory()
    for at, loss in enumerate(losses[: step - 1]):
        late.remember(at, loss, 3 * loss, config)
    for at, loss in enumerate(losses[:step]):
        early.remember(at, loss, 3 * loss, config)
    resumed.continue_from(early)
    (limit, of_loss, of_norm), *others = [history.limits(step, config) for history in (late, early, resumed)]
    assert others == [(limit, of_loss, of_norm)] * 2
    known = sorted(losses[: step - 1][-MEDIAN_OVER:])
    expected = math.inf
    if len(known) >= MEDIAN_FROM:
        expected = known[(len(known) - 1) // 2] + known[len(known) // 2]
    assert limit == pytest.approx(expected)
    last = torch.tensor(losses[: step - 1][-config.skip_window :], dtype=torch.float64)
    if len(last) < config.skip_window // 2 or (last == last[0]).all():
        assert of_loss == of_norm == math.inf
    else:
        deviation, mean = torch.std_mean(last)
        assert of_loss == pytest.approx(float(mean + 3 * deviation))
        assert of_norm == pytest.approx(float(3 * (mean + 3 * deviation)))
    assert early.limits(step, ResilienceConfig()) == NO_LIMITS


def test_no_more_is_remembered_than_limits_need() -> None:
    for config, kept in (
        (ResilienceConfig(), (0, 0)),
        (ResilienceConfig(loss_spike=2.0), (MEDIAN_OVER + 1, 0)),
        (ResilienceConfig(skip_above_deviations=6.0, skip_window=10), (11, 11)),
        (ResilienceConfig(loss_spike=2.0, skip_above_deviations=6.0, skip_window=10), (MEDIAN_OVER + 1, 11)),
    ):
        history = RunHistory()
        for step in range(200):
            history.remember(step, 1.0, 2.0, config)
        assert (len(history.losses), len(history.grad_norms)) == kept


def test_what_is_written_beside_the_checkpoints_is_added_to_what_they_say(tmp_path: Path) -> None:
    assert read_history(tmp_path, ((3, 5),), 1) == RunHistory(SkippedRanges(((3, 5),)), 1)
    RunHistory(SkippedRanges(((4, 8), (20, 24))), 2).write(tmp_path)
    assert read_history(tmp_path, ((3, 5),), 1) == RunHistory(SkippedRanges(((3, 8), (20, 24))), 2)


@pytest.mark.parametrize(
    "content", ["", "{}", '{"skipped": [[1]], "num_rollbacks": 0}', '{"skipped": 3, "num_rollbacks": 0}']
)
def test_a_damaged_file_is_no_empty_one(content: str, tmp_path: Path) -> None:
    (tmp_path / SKIPPED).write_text(content)
    with pytest.raises(CheckpointError, match="would be trained on"):
        read_history(tmp_path)


def test_a_start_from_scratch_trains_on_everything_again(tmp_path: Path) -> None:
    RunHistory(SkippedRanges(((4, 8),)), 1).write(tmp_path)
    aside = CheckpointDirectory(tmp_path).set_aside()
    assert aside is not None and (aside / SKIPPED).exists() and not (tmp_path / SKIPPED).exists()
