"""Checkpoints with a moving average: resumed to the bit in any layout, begun where none was saved, left out where none is kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.runs import engine_of, fingerprint_of, run
from tests.harness import run_ranks
from tests.parity.cases import Case
from triaxis.engine.checkpoint.directory import CheckpointDirectory, find
from triaxis.engine.checkpoint.format.manifest import write_manifest
from triaxis.engine.checkpoint.resume import resume_or_start
from triaxis.engine.errors import CheckpointError
from triaxis.launch.inspect.check import check_files
from triaxis.launch.inspect.compare import compared_kinds

pytestmark = pytest.mark.distributed

WITH = Case("gpt", num_layers=2, global_batch_size=4, micro_batch_size=2, ema=0.75)
WITHOUT = replace(WITH, ema=None)
KINDS = ("master", "exp_avg", "exp_avg_sq", "ema")
SAVING = {"interval": 2}
STARTED = "ema: none was saved, so it starts as the loaded weights"


def begin(rank: int, case: Case, folder: str, checkpoint: dict[str, Any]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The fingerprints right after the start, and the differences that are printed."""
    engine = engine_of(rank, case, checkpoint)
    point = resume_or_start(engine, CheckpointDirectory(Path(folder)), has_saved=False, data={"samples": "same"})
    found = fingerprint_of(engine)
    assert all(owned.state.read("ema").equal(owned.state.read("master")) for owned in engine.optimizer.trained) == (
        point.source is None or point.loaded == "weights" or "ema" not in find(point.source).manifest.kinds
    )
    engine.topology.close()
    return found, point.differences


def saved(tmp_path: Path, case: Case) -> Path:
    """Two steps of a run of one process, saved."""
    run(0, case, str(tmp_path / "saved"), 2, 0, SAVING)
    return tmp_path / "saved"


def test_a_run_resumes_to_the_bit_with_its_average(tmp_path: Path) -> None:
    straight = run(0, WITH, str(tmp_path / "straight"), 4, 0, {}, (2, 4))
    before = run(0, WITH, str(tmp_path / "cut"), 2, 0, SAVING, (2,))
    candidate = find(tmp_path / "cut")
    assert candidate.manifest.kinds == KINDS and set(candidate.manifest.fingerprint) == set(KINDS)
    assert before.fingerprints[2] == candidate.manifest.fingerprint == straight.fingerprints[2]
    assert check_files(candidate.folder, lambda num_bytes: None).problems == ()
    after = run(0, WITH, str(tmp_path / "cut"), 4, 1, SAVING, (4,))
    assert after.began == 2
    assert after.fingerprints == {4: straight.fingerprints[4]}
    assert after.fingerprints[4]["ema"] != before.fingerprints[2]["ema"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("saves", "resumes"),
    [
        (replace(WITH, dp=2), replace(WITH, tp=2)),
        pytest.param(replace(WITH, tp=2, pp=2, bucket_bytes=300), replace(WITH, dp=2), marks=pytest.mark.slow),
        pytest.param(
            Case("deepseek", dp=2, ep=2, ema=0.75), Case("deepseek", tp=2, pp=2, ema=0.75), marks=pytest.mark.slow
        ),
        pytest.param(
            replace(WITH, dp=2, dtype="bf16", narrow=True), replace(WITH, tp=2, dtype="bf16"), marks=pytest.mark.slow
        ),
    ],
    ids=lambda case: str(case),
)
def test_any_layout_resumes_the_average_to_the_bit(saves: Case, resumes: Case, tmp_path: Path) -> None:
    before = run_ranks(run, saves.world_size, saves, str(tmp_path / "saved"), 2, 0, SAVING, (2,))[0]
    load = {"load": str(tmp_path / "saved"), "accept": ["precision"]}
    after, _ = run_ranks(begin, resumes.world_size, resumes, str(tmp_path / "other"), load)[0]
    compared = [kind for kind in KINDS if saves.narrow == resumes.narrow or kind in ("master", "ema")]
    assert [after[kind] for kind in compared] == [before.fingerprints[2][kind] for kind in compared]


def test_an_average_starts_as_the_loaded_weights_where_none_was_saved(tmp_path: Path) -> None:
    load = {"load": str(saved(tmp_path, WITHOUT))}
    with pytest.raises(
        CheckpointError, match=r"(?s)checkpoint.accept=\[optimizer.ema.decay\]'\n  optimizer.ema.decay: absent there"
    ):
        begin(0, WITH, str(tmp_path / "other"), load)
    _, told = begin(0, WITH, str(tmp_path / "other"), load | {"accept": ["optimizer.ema"]})
    assert STARTED in told
    # An import of Megatron's training state has no layout and no `ema` field, and needs no word from the user.
    candidate = find(tmp_path / "saved")
    config = {name: dict(section) for name, section in candidate.manifest.config.items()}
    del config["optimizer"]["ema"]
    write_manifest(candidate.folder, candidate.manifest.model_copy(update={"layout": {}, "config": config}))
    _, told = begin(0, WITH, str(tmp_path / "other"), load)
    assert STARTED in told


def test_weights_alone_begin_a_new_average(tmp_path: Path) -> None:
    load = {"load": str(saved(tmp_path, WITH)), "load_what": "weights"}
    _, told = begin(0, WITH, str(tmp_path / "other"), load)
    assert told == ()


def test_an_average_is_left_out_where_none_is_kept(tmp_path: Path) -> None:
    load = {"load": str(saved(tmp_path, WITH)), "accept": ["optimizer.ema"]}
    trace = run(0, WITHOUT, str(tmp_path / "other"), 3, 0, load | {"interval": 3}, (2,))
    one, other = find(tmp_path / "saved").manifest, find(tmp_path / "other").manifest
    assert (trace.began, trace.fingerprints[2]) == (2, {kind: one.fingerprint[kind] for kind in KINDS[:-1]})
    assert compared_kinds(one, other) == KINDS[:-1] == other.kinds
