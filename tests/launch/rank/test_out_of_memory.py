"""A rank that runs out of memory says which it is, where it was, what holds how much, and what would hold less."""

import errno
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.launch.command_line import events
from tests.launch.forked_ranks import train_in
from tests.parity.cases import Case
from tests.parity.test_step_properties import build_rank
from triaxis.engine.comm.topology import Topology
from triaxis.engine.errors import OutOfMemoryError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.launch.rank.memory_snapshot import HISTORY_ENTRIES, remember_allocations, write_snapshot
from triaxis.launch.rank.out_of_memory import explaining_memory

pytestmark = pytest.mark.distributed


def test_a_run_that_needs_too_much_ends_with_a_table(tmp_path: Path) -> None:
    """The scores of one layer are 512 GiB, which no machine hands out; the exit code says that trying again is no use."""
    overrides = ("data.synthetic=true", "model.seq_length=131072", "kernels.attention=explicit", "train.steps=20")
    batch = ("train.global_batch_size=4", "train.micro_batch_size=2")
    silent = ("eval.interval=null", "telemetry.sample_tokens=0", "checkpoint.interval=never")
    one_rank = ("model.num_layers=2", "parallel.tp=1", "parallel.pp=1", "parallel.vpp=1", "parallel.dp=1")
    said = train_in(tmp_path, *overrides, *batch, *silent, *one_rank)
    assert said.exit_code == 2
    everything = said.out + said.err
    assert "Traceback" not in everything
    for words in (
        "rank 0 (pp 0, dp 0, tp 0) is out of memory at 0F0, forward of microbatch 0 on chunk 0",
        "an allocation of 549.76 GB of host memory failed",
        "kernels.attention=sdpa: ",
        "train.micro_batch_size=1: ",
    ):
        assert words in everything
    rows = {line.split()[0]: line.split() for line in everything.splitlines() if line.startswith("  ") and line.split()}
    assert rows["parameters"][1:3] == rows["parameters"][3:5] == ["1.90", "MB"]
    assert rows["optimizer"][1:3] == rows["optimizer"][3:5]
    told = events(tmp_path / "runs" / "gpt_tiny")
    assert any(event["kind"] == "failed" and event["error"].startswith("OutOfMemoryError") for event in told)


def test_the_memory_that_has_run_out_is_named() -> None:
    """In the words of what was asked for it, which a GPU's own table does not show."""
    topology = Topology(RankGrid(ParallelSizes()), 0, torch.device("cpu"))
    config = Case("gpt").config()
    for error, words in (
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "an allocation of pinned host memory"),
        (dist.DistBackendError("Failed to CUDA calloc async 4194304 bytes"), "an allocation of 4.19 MB of GPU memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "an allocation of host memory"),
    ):
        with pytest.raises(OutOfMemoryError) as told, explaining_memory(config, topology):
            raise error
        assert words in str(told.value) and "The host has" in str(told.value)


def out_of_memory_in_a_backward(rank: int, case: Case, error: str, folder: str | None = None) -> str:
    engine, batches = build_rank(rank, case)
    observed = engine.executor

    def fail(instruction: object) -> None:
        if str(instruction) == "0B1":
            raise {"cuda": torch.OutOfMemoryError, "other": RuntimeError}[error](
                "Tried to allocate 2.50 GiB. GPU 0 has ..."
            )

    observed.observers = (fail,)
    snapshot = None
    if folder is not None:
        path = Path(folder) / "memory" / "rank.pickle"
        snapshot = partial(write_snapshot, path, has_history=False, dump=lambda where: Path(where).write_text("blocks"))
    try:
        with explaining_memory(engine.config, engine.topology, snapshot, engine):
            engine.train_step(batches.next_step(), 1e-3)
    except (OutOfMemoryError, RuntimeError) as raised:
        return f"{type(raised).__name__}: {raised}"
    finally:
        batches.close()
    return "nothing"


def test_the_words_of_a_gpu_are_understood_and_other_errors_left_alone() -> None:
    (text,) = run_ranks(out_of_memory_in_a_backward, 1, Case("llama"), "cuda")
    assert text.startswith("OutOfMemoryError: rank 0")
    assert "at 0B1, backward of microbatch 1 on chunk 0: an allocation of 2.50 GiB of GPU memory failed." in text
    (text,) = run_ranks(out_of_memory_in_a_backward, 1, Case("llama"), "other")
    assert text.startswith("RuntimeError: Tried")


def test_a_snapshot_is_written_and_named(tmp_path: Path) -> None:
    (text,) = run_ranks(out_of_memory_in_a_backward, 1, Case("llama"), "cuda", str(tmp_path))
    written = tmp_path / "memory" / "rank.pickle"
    assert written.read_text() == "blocks"
    assert str(written) in text.splitlines()[-1] and "telemetry.memory_history=true" in text.splitlines()[-1]
    (text,) = run_ranks(out_of_memory_in_a_backward, 1, Case("llama"), "other", str(tmp_path / "another"))
    assert text.startswith("RuntimeError") and not (tmp_path / "another").exists()


def full_disk(path: str) -> None:
    raise OSError(28, "No space left on device")


def test_a_snapshot_that_cannot_be_written_hides_nothing(tmp_path: Path) -> None:
    said = write_snapshot(tmp_path / "rank.pickle", has_history=True, dump=full_disk)
    assert "could not be written" in said and "No space left" in said


def test_a_history_is_bounded(tmp_path: Path) -> None:
    asked: list[dict[str, object]] = []
    remember_allocations(lambda **given: asked.append(given))
    assert [given["max_entries"] for given in asked] == [HISTORY_ENTRIES]
    said = write_snapshot(tmp_path / "rank.pickle", has_history=True, dump=lambda where: None)
    assert said.endswith("memory_viz).")


# On a card ---------------------------------------------------------------------------------------------------------------


def out_of_a_card(rank: int, folder: str) -> tuple[str, list[int], bool]:
    """(what is said, sizes of the live blocks in the snapshot, whether it knows who asked) when a GPU has no more."""
    import pickle

    remember_allocations()
    kept = torch.ones(3, 1 << 20, device="cuda")
    path = Path(folder) / "rank.pickle"
    said = ""
    try:
        torch.empty(1 << 50, device="cuda", dtype=torch.uint8)
    except torch.OutOfMemoryError:
        said = write_snapshot(path, has_history=True)
    found = pickle.loads(path.read_bytes())
    blocks = [block for segment in found["segments"] for block in segment["blocks"] if "active" in block["state"]]
    frames = [frame["filename"] for block in blocks for frame in block.get("frames", ())]
    return said, [block["size"] for block in blocks], kept.is_cuda and any(__file__ in name for name in frames)


@pytest.mark.gpu
def test_the_snapshot_of_a_card_has_its_blocks_and_who_asked_for_them(tmp_path: Path) -> None:
    ((said, sizes, knows),) = run_ranks(out_of_a_card, 1, str(tmp_path))
    assert str(tmp_path) in said and 3 * 4 * (1 << 20) in sizes and knows
