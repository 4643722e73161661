"""N + M steps straight = N steps, save, other processes, M steps: to the bit, with dropout, masks and clipping.

The CI tier has one process in bf16, dp=4 in fp32, all axes in bf16; the slow tier adds the other dtype of each.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.runs import Trace, engine_of, run
from tests.harness import run_ranks
from tests.parity.cases import Case
from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.format import manifest
from triaxis.engine.checkpoint.resume import resume_or_start

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "one process": {"global_batch_size": 4},
    "dp4": {"dp": 4, "global_batch_size": 4},
    "tp2 pp2 vpp2 dp2": {"tp": 2, "pp": 2, "vpp": 2, "dp": 2, "sequence_parallel": True, "global_batch_size": 4},
    "fp8": {"tp": 2, "dp": 2, "sequence_parallel": True, "global_batch_size": 4, "fp8": "tensorwise"},
}
NUM_BEFORE, NUM_STEPS = 2, 3
LOOK_AT = (0, NUM_BEFORE, NUM_STEPS)

WIDE = Case("qwen", tp=2, dp=2, dtype="bf16", num_layers=2, global_batch_size=4)
NARROW = replace(WIDE, narrow=True)
TWO = replace(WIDE, tp=1)

LEFT_TO_SLOW = [
    ("one process", "fp32"),
    ("dp4", "bf16"),
    ("tp2 pp2 vpp2 dp2", "fp32"),
    ("fp8", "fp32"),
    ("fp8", "bf16"),
]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param(layout, dtype, marks=pytest.mark.slow if (layout, dtype) in LEFT_TO_SLOW else [])
        for layout in LAYOUTS
        for dtype in ("fp32", "bf16")
    ],
)
def test_a_resumed_run_equals_the_undisturbed_one_to_the_bit(layout: str, dtype: str, tmp_path: Path) -> None:
    case = Case("gpt_dropout", dtype=dtype, num_layers=4, **LAYOUTS[layout])
    saving = {"interval": NUM_BEFORE}
    cut = str(tmp_path / "cut")
    straight: list[Trace] = run_ranks(run, case.world_size, case, str(tmp_path / "straight"), NUM_STEPS, 0, {}, LOOK_AT)
    before: list[Trace] = run_ranks(run, case.world_size, case, cut, NUM_BEFORE, 0, saving, LOOK_AT)
    after: list[Trace] = run_ranks(run, case.world_size, case, cut, NUM_STEPS, 1, saving, LOOK_AT)

    assert {trace.began for trace in straight} == {trace.began for trace in before} == {0}
    assert {trace.began for trace in after} == {NUM_BEFORE}
    for whole, first, second in zip(straight, before, after, strict=True):
        assert [*first.losses, *second.losses] == whole.losses
        assert [*first.sample_ids, *second.sample_ids] == whole.sample_ids
        assert first.fingerprints | second.fingerprints == whole.fingerprints
        assert second.fingerprints[NUM_BEFORE] == first.fingerprints[NUM_BEFORE]
    assert len({str(state) for state in straight[0].fingerprints.values()}) == len(LOOK_AT), "steps change the state"
    assert not (tmp_path / "straight").exists(), "checkpoint.interval=never saves nothing, the last step neither"


def test_written_while_training_waits_is_the_same_checkpoint(tmp_path: Path) -> None:
    traces = []
    for name, in_background in (("behind", True), ("waiting", False)):
        saving = {"interval": 2, "async": in_background, "keep_last": 1}
        run_ranks(run, 2, TWO, str(tmp_path / name), 4, 0, saving)
        assert [folder.name for folder in (tmp_path / name).glob("step_*")] == ["step_00000004"]
        traces.append(run_ranks(run, 2, TWO, str(tmp_path / name), 4, 1, saving, (4,))[0])
    assert traces[0].began == traces[1].began == 4
    assert traces[0].fingerprints == traces[1].fingerprints and traces[0].fingerprints


def files_looked_at(rank: int, case: Case, folder: str) -> int:
    """How many sizes of files a rank asks the file system for when it begins from a folder of checkpoints."""
    looked_at = []
    problem_of = manifest._file_problem
    manifest._file_problem = lambda path, num_bytes: (looked_at.append(path), problem_of(path, num_bytes))[1]
    engine = engine_of(rank, case, {})
    beginning = resume_or_start(engine, CheckpointDirectory(Path(folder)), has_saved=True, data={"samples": "same"})
    assert beginning.state.step == NUM_BEFORE
    return len(looked_at)


def test_only_rank_0_looks_at_every_file_of_a_checkpoint(tmp_path: Path) -> None:
    """With a file per rank, all ranks together would ask for the square of their number."""
    case = Case("gpt", dp=4, num_layers=2, global_batch_size=4)
    run_ranks(run, 4, case, str(tmp_path), NUM_BEFORE, 0, {"interval": NUM_BEFORE})
    assert run_ranks(files_looked_at, 4, case, str(tmp_path)) == [4, 0, 0, 0]


# Other forms of the optimizer's state ------------------------------------------------------------------------------------

MEANT = {"interval": 2, "accept": ["precision.moments"]}


@pytest.mark.parametrize("in_background", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_with_narrow_state_resumes_to_the_bit(in_background: bool, tmp_path: Path) -> None:
    saving = {"interval": 2, "async": in_background}
    (straight, *_) = run_ranks(run, 4, NARROW, str(tmp_path / "straight"), 4, 0, {}, (2, 4))
    (before, *_) = run_ranks(run, 4, NARROW, str(tmp_path / "cut"), 2, 0, saving, (2,))
    (after, *_) = run_ranks(run, 4, NARROW, str(tmp_path / "cut"), 4, 1, saving, (2, 4))
    assert [*before.losses, *after.losses] == straight.losses
    assert before.fingerprints[2] == after.fingerprints[2]
    assert after.fingerprints == straight.fingerprints


def test_a_checkpoint_goes_over_into_the_other_form(tmp_path: Path) -> None:
    """Masters are the same to the bit either way; moments are rounded going in, and nothing is lost coming out."""
    (wide, *_) = run_ranks(run, 4, WIDE, str(tmp_path / "run"), 2, 0, {"interval": 2}, (2,))
    (narrow, *_) = run_ranks(run, 4, NARROW, str(tmp_path / "run"), 4, 1, MEANT, (2, 4))
    assert narrow.began == 2
    assert narrow.fingerprints[2]["master"] == wide.fingerprints[2]["master"]
    assert narrow.fingerprints[2]["exp_avg"] != wide.fingerprints[2]["exp_avg"]
    (back, *_) = run_ranks(run, 4, WIDE, str(tmp_path / "run"), 4, 2, MEANT, (4,))
    assert back.began == 4 and back.fingerprints[4] == narrow.fingerprints[4]
