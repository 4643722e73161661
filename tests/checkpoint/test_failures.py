"""What goes wrong while saving or beginning: a clear error, the run goes on or stops as documented, older checkpoints unharmed."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import Silent, engine_of, facts_of, fingerprint_of, run
from tests.harness import run_ranks
from tests.lacking import give_up
from tests.parity.cases import Case, dataset
from triaxis.engine.checkpoint import writer
from triaxis.engine.checkpoint.directory import Candidate, CheckpointDirectory, find
from triaxis.engine.checkpoint.format.manifest import read_manifest
from triaxis.engine.checkpoint.resume import ResumePoint, data_differences, resume_or_start
from triaxis.engine.checkpoint.saving import CheckpointSaver
from triaxis.engine.comm.agreement import StepFlags
from triaxis.engine.data.corpus.tokenizers import load_tokenizer
from triaxis.engine.data.loader import Batches
from triaxis.engine.errors import CheckpointError

pytestmark = pytest.mark.distributed

CASE = Case("gpt", num_layers=2, global_batch_size=2)
TWO = replace(CASE, dp=2)


def train(
    rank: int,
    case: Case,
    folder: str,
    steps: int,
    before_step: Callable[[int, int, Path], None],
    section: dict[str, Any],
) -> tuple[list[int], list[tuple[int, str]], str]:
    """Train `steps` steps, saving after each; returns (saved steps, failures, the error at the end)."""
    writer.RETRY_PAUSES_SECONDS = (0.01, 0.01)  # type: ignore[assignment]
    engine = engine_of(rank, case, {"interval": 1, "keep_last": None, **section})
    notices = Silent()
    checkpoints = CheckpointSaver(engine, CheckpointDirectory(Path(folder)), facts_of(engine.config), notices)
    batches = Batches(
        dataset(engine.config),
        global_batch_size=case.global_batch_size,
        micro_batch_size=1,
        dp=case.dp,
        dp_rank=rank,
        consumed_samples=0,
        device="cpu",
    )
    for step in range(1, steps + 1):
        before_step(rank, step, Path(folder))
        result = engine.update(
            engine.forward_backward(batches.next_step()), 1e-2, StepFlags(checkpoints.flags())
        ).wait()
        checkpoints.agreed(result.flags.save)
        checkpoints.after_step(step, batches.consumed_samples, 1e-2, is_last=step == steps)
    error = ""
    try:
        checkpoints.finish()
    except CheckpointError as caught:
        # A full disk is no mistake in the configuration: a batch job may start again.
        assert caught.exit_code == 1
        error = str(caught)
    checkpoints.close()
    batches.close()
    return notices.saved, notices.failures, error


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB: room for several checkpoints of `CASE`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        give_up("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill_for_step_2(rank: int, step: int, folder: Path) -> None:
    filler = folder.parent / "filler"
    if step == 2:
        free = shutil.disk_usage(folder.parent).free
        filler.write_bytes(bytes(max(0, free - 20_000)))
    if step == 3:
        filler.unlink()


def read_only_for_step_2(rank: int, step: int, folder: Path) -> None:
    mode = {2: "ro", 3: "rw"}.get(step)
    if mode is not None and rank == 0:
        subprocess.run(["mount", "-o", f"remount,{mode}", folder.parent], check=True)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [(fill_for_step_2, "No space left on device"), (read_only_for_step_2, "Read-only file system")],
)
def test_a_save_that_fails_is_reported_and_training_goes_on(
    small_disk: Path, trouble: Callable[[int, int, Path], None], words: str
) -> None:
    folder = small_disk / "checkpoints"
    # Waiting for the disk, so that a save meets the state of the disk at its own step.
    ((saved, failures, error),) = run_ranks(train, 1, CASE, str(folder), 3, trouble, {"async": False, "keep_last": 1})
    assert saved == [1, 3]
    assert [step for step, _ in failures] == [2] and failures[0][1].startswith("rank 0: ") and words in failures[0][1]
    assert error == ""
    assert [entry.name for entry in folder.iterdir() if entry.is_dir()] == ["step_00000003"], (
        "nothing half-written is left"
    )
    read_manifest(folder / "step_00000003")


def break_rank_1(rank: int, step: int, folder: Path) -> None:
    if rank == 1 and step == 2:

        def fail(*_: object) -> None:
            raise OSError(5, "Input/output error", "rank_00001.safetensors")

        writer.write_file = fail  # type: ignore[assignment]


def test_the_last_save_must_succeed_and_every_rank_knows_why_it_did_not(tmp_path: Path) -> None:
    results = run_ranks(train, 2, TWO, str(tmp_path), 2, break_rank_1, {"async": False})
    for saved, failures, error in results:
        assert saved == [1]
        assert failures == [(2, "rank 1: Input/output error (rank_00001.safetensors)")]
        assert "the last checkpoint could not be written" in error and "rank 1" in error
    candidate = next(CheckpointDirectory(tmp_path).candidates([]))
    assert candidate.manifest.state.step == 1
    assert not list(tmp_path.glob("*.attempt_*"))


def fail_once(rank: int, step: int, folder: Path) -> None:
    if step == 1:
        write = writer.write_file
        calls: list[int] = []

        def flaky(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 1:
                raise OSError(5, "Input/output error")
            return write(*args)

        writer.write_file = flaky


def test_a_write_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    ((saved, failures, error),) = run_ranks(train, 1, CASE, str(tmp_path), 2, fail_once, {})
    assert (saved, failures, error) == ([1, 2], [], "")
    assert len(list(CheckpointDirectory(tmp_path).candidates([]))) == 2


def no_trouble(rank: int, step: int, folder: Path) -> None:
    pass


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2; `two_checkpoints` is a test's own copy."""
    folder = tmp_path_factory.mktemp("trained")
    run_ranks(train, 1, CASE, str(folder), 2, no_trouble, {})
    return folder


@pytest.fixture
def two_checkpoints(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def flip_a_bit(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def begin_alone(rank: int, case: Case, folder: str, section: dict[str, Any], **known: Any) -> ResumePoint | str:
    engine = engine_of(rank, case, section)
    known = {"has_saved": False, "data": {"samples": "same"}} | known
    try:
        return resume_or_start(engine, CheckpointDirectory(Path(folder)), **known)
    except CheckpointError as error:
        return str(error)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(two_checkpoints: Path) -> None:
    newest = two_checkpoints / "step_00000002"
    flip_a_bit(newest)
    for rank, beginning in enumerate(run_ranks(begin_alone, 2, TWO, str(two_checkpoints), {})):
        assert isinstance(beginning, ResumePoint), beginning
        assert beginning.state.step == 1
        if rank == 0:
            assert (
                len(beginning.passed_over) == 1 and str(newest / "rank_00000.safetensors") in beginning.passed_over[0]
            )
    assert newest.exists(), "what is damaged may still be wanted"


def test_without_a_complete_checkpoint_a_run_that_saved_never_starts_from_random_weights(two_checkpoints: Path) -> None:
    flip_a_bit(two_checkpoints / "step_00000002")
    (two_checkpoints / "step_00000001" / "manifest.json").unlink()
    for text in run_ranks(begin_alone, 2, TWO, str(two_checkpoints), {}):
        assert isinstance(text, str)
        assert "step_00000002" in text and "step_00000001" in text and "--from-scratch" in text

    shutil.rmtree(two_checkpoints)
    (text,) = run_ranks(begin_removed, 1, str(two_checkpoints))
    assert "holds none any more" in text and "--from-scratch" in text


def begin_removed(rank: int, folder: str) -> ResumePoint | str:
    return begin_alone(rank, CASE, folder, {}, has_saved=True)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"load": "nowhere"}, ["nowhere", "no such folder", "random weights"]),
        ({"load": "."}, ["no step_<number> folder"]),
    ],
)
def test_told_to_load_and_nothing_there(
    section: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    section = {"load": str(tmp_path / ("empty" if section["load"] == "." else section["load"]))}
    (text,) = run_ranks(begin_alone, 1, CASE, str(tmp_path / "own"), section)
    assert isinstance(text, str) and all(word in text for word in words), text


def test_what_is_of_another_model_or_another_run_is_refused_by_name(two_checkpoints: Path, tmp_path: Path) -> None:
    load = {"load": str(two_checkpoints)}
    (text,) = run_ranks(begin_alone, 1, replace(CASE, model="qwen"), str(tmp_path / "own"), load)
    assert (
        "may not change" in text
        and "model.num_kv_heads" in text
        and "model.norm: layernorm there, rmsnorm here" in text
    )
    (text,) = run_ranks(begin_alone, 1, replace(CASE, global_batch_size=4), str(tmp_path / "own"), load)
    assert "train.global_batch_size: 2 there, 4 here" in text
    (text,) = run_ranks(begin_alone, 1, replace(CASE, dtype="fp32"), str(tmp_path / "own"), load)
    assert "precision.dtype: float64 there, fp32 here" in text and "checkpoint.accept=[precision.dtype]" in text
    meant = load | {"accept": ["precision.dtype"]}
    (beginning,) = run_ranks(begin_alone, 1, replace(CASE, dtype="fp32"), str(tmp_path / "own"), meant)
    assert isinstance(beginning, ResumePoint) and beginning.state.step == 2
    (text,) = run_ranks(begin_other_data, 1, str(tmp_path / "own"), load)
    assert "but other fingerprints for samples" in text and "checkpoint.accept=[data]" in text
    (beginning,) = run_ranks(begin_other_data, 1, str(tmp_path / "own"), load | {"accept": ["data"]})
    assert isinstance(beginning, ResumePoint) and beginning.state.step == 2


def test_bytes_that_an_earlier_version_assumed_are_no_other_tokenizer(two_checkpoints: Path) -> None:
    """The corpus is the same, and its record names the tokenizer now; no other difference of tokenizers may pass."""
    candidate = find(two_checkpoints)
    samples = candidate.manifest.state.data["samples"]

    def differences(saved: dict[str, str], now: dict[str, str]) -> list[str]:
        state = candidate.manifest.state.model_copy(update={"data": saved})
        manifest = candidate.manifest.model_copy(update={"state": state})
        return data_differences(Candidate(candidate.folder, manifest), now, [])

    assumed, recorded = {"tokenizer": load_tokenizer("bytes").identity}, {"tokenizer": "0" * 64}
    same = {"samples": samples}
    assert "bytes were assumed there" in differences(same | assumed, same | recorded)[0]
    for saved, now in (
        (same | recorded, same | assumed),
        (assumed, recorded),
        (same | assumed, {"samples": "x"} | recorded),
    ):
        with pytest.raises(CheckpointError, match=r"data\.tokenizer is not the tokenizer"):
            differences(saved, now)


def begin_other_data(rank: int, folder: str, section: dict[str, Any]) -> ResumePoint | str:
    return begin_alone(rank, CASE, folder, section, data={"samples": "others"})


def weights_only(rank: int, folder: str, load: str) -> tuple[ResumePoint, int, bool, dict[str, str]]:
    engine = engine_of(rank, CASE, {"load": load, "load_what": "weights"})
    beginning = resume_or_start(engine, CheckpointDirectory(Path(folder)), has_saved=False, data={"samples": "others"})
    untouched = all(
        not torch.any(owned.state.read("exp_avg")) and not torch.any(owned.state.read("exp_avg_sq"))
        for owned in engine.optimizer.owned
    )
    return beginning, engine.optimizer.num_updates, untouched, dict(fingerprint_of(engine))


def test_weights_alone_start_at_step_0_with_a_fresh_optimizer_and_a_lineage(
    two_checkpoints: Path, tmp_path: Path
) -> None:
    source = two_checkpoints / "step_00000001"
    ((beginning, num_updates, untouched, fingerprint),) = run_ranks(weights_only, 1, str(tmp_path / "own"), str(source))
    manifest = find(source).manifest
    assert beginning.state.step == beginning.state.consumed_samples == num_updates == 0 and untouched
    assert fingerprint["master"] == manifest.fingerprint["master"]
    (ancestor,) = beginning.lineage
    assert (ancestor.path, ancestor.step, ancestor.loaded) == (str(source), 1, "weights")


def test_a_runs_own_checkpoints_come_before_the_one_it_was_told_to_load(two_checkpoints: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    load = {"load": str(two_checkpoints / "step_00000001"), "interval": 1, "keep_last": None}
    (first,) = run_ranks(run, 1, CASE, str(own), 4, 0, load)
    (second,) = run_ranks(run, 1, CASE, str(own), 6, 1, load)
    assert (first.began, second.began) == (1, 4)
    assert [ancestor.step for ancestor in find(own).manifest.lineage] == [1], "going on adds no ancestor"
    # `latest` is a text file that a person may edit to go back.
    (own / "latest").write_text("step_00000003\n")
    (third,) = run_ranks(run, 1, CASE, str(own), 6, 2, load)
    assert third.began == 3
    assert third.losses == [*first.losses[2:], *second.losses], "the same steps again, to the bit"
