"""N + M steps straight = N steps, save, other processes, M steps: to the bit, with dropout, masks and clipping."""

from pathlib import Path

import pytest

from tests.checkpoint.runs import Trace, run
from tests.harness import run_ranks
from tests.parity.cases import Case

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "one process": {},
    "dp8": {"dp": 8},
    "tp2 pp2 vpp2 dp2": {"tp": 2, "pp": 2, "vpp": 2, "dp": 2, "sequence_parallel": True},
}
NUM_BEFORE, NUM_STEPS = 3, 6

LEFT_TO_SLOW = [("one process", "fp32"), ("dp8", "bf16")]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        # Each layout and each dtype in the CI tier; the product in the slow one.
        pytest.param(layout, dtype, marks=pytest.mark.slow if (layout, dtype) in LEFT_TO_SLOW else [])
        for layout in LAYOUTS
        for dtype in ("fp32", "bf16")
    ],
)
def test_a_resumed_run_equals_the_undisturbed_one_to_the_bit(layout: str, dtype: str, tmp_path: Path) -> None:
    case = Case("gpt_dropout", dtype=dtype, **LAYOUTS[layout])
    saving = {"interval": NUM_BEFORE}
    straight: list[Trace] = run_ranks(run, case.world_size, case, str(tmp_path / "straight"), NUM_STEPS, 0, {})
    before: list[Trace] = run_ranks(run, case.world_size, case, str(tmp_path / "cut"), NUM_BEFORE, 0, saving)
    after: list[Trace] = run_ranks(run, case.world_size, case, str(tmp_path / "cut"), NUM_STEPS, 1, saving)

    assert {trace.began for trace in straight} == {trace.began for trace in before} == {0}
    assert {trace.began for trace in after} == {NUM_BEFORE}
    for whole, first, second in zip(straight, before, after, strict=True):
        assert [*first.losses, *second.losses] == whole.losses
        assert [*first.sample_ids, *second.sample_ids] == whole.sample_ids
        assert [*first.fingerprints, *second.fingerprints[1:]] == whole.fingerprints
        assert second.fingerprints[0] == first.fingerprints[-1]
    assert len({str(step) for step in straight[0].fingerprints}) == NUM_STEPS + 1, "every step changes the state"


def test_written_while_training_waits_is_the_same_checkpoint(tmp_path: Path) -> None:
    case = Case("qwen", tp=2, dp=2, dtype="bf16")
    traces = []
    for name, in_background in (("behind", True), ("waiting", False)):
        saving = {"interval": 2, "async": in_background, "keep_last": 1}
        run_ranks(run, 4, case, str(tmp_path / name), 4, 0, saving)
        assert [folder.name for folder in (tmp_path / name).glob("step_*")] == ["step_00000004"]
        traces.append(run_ranks(run, 4, case, str(tmp_path / name), 4, 1, saving)[0])
    assert traces[0].began == traces[1].began == 4
    assert traces[0].fingerprints == traces[1].fingerprints


# Other forms of the optimizer's state ------------------------------------------------------------------------------------

WIDE = Case("qwen", tp=2, dp=2, dtype="bf16")
NARROW = Case("qwen", tp=2, dp=2, dtype="bf16", narrow=True)
MEANT = {"interval": 2, "accept": ["precision.moments"]}


@pytest.mark.parametrize("in_background", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_with_narrow_state_resumes_to_the_bit(in_background: bool, tmp_path: Path) -> None:
    saving = {"interval": 2, "async": in_background}
    (straight, *_) = run_ranks(run, 4, NARROW, str(tmp_path / "straight"), 4, 0, {})
    (before, *_) = run_ranks(run, 4, NARROW, str(tmp_path / "cut"), 2, 0, saving)
    (after, *_) = run_ranks(run, 4, NARROW, str(tmp_path / "cut"), 4, 1, saving)
    assert [*before.losses, *after.losses] == straight.losses
    assert [*before.fingerprints, *after.fingerprints[1:]] == straight.fingerprints


def test_a_checkpoint_goes_over_into_the_other_form(tmp_path: Path) -> None:
    """Masters are the same to the bit either way; moments are rounded going in, and nothing is lost coming out."""
    (wide, *_) = run_ranks(run, 4, WIDE, str(tmp_path / "run"), 2, 0, {"interval": 2})
    (narrow, *_) = run_ranks(run, 4, NARROW, str(tmp_path / "run"), 4, 1, MEANT)
    assert narrow.began == 2
    assert narrow.fingerprints[0]["master"] == wide.fingerprints[-1]["master"]
    assert narrow.fingerprints[0]["exp_avg"] != wide.fingerprints[-1]["exp_avg"]
    (back, *_) = run_ranks(run, 4, WIDE, str(tmp_path / "run"), 4, 2, MEANT)
    assert back.began == 4 and back.fingerprints == [narrow.fingerprints[-1]]
