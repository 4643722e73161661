"""Checkpoints that one process writes and reads: streamed, checked before they count, read whole or by boxes."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.samples import bits, commit, model, training_shards
from triaxis.engine.checkpoint import import_weights as offline
from triaxis.engine.checkpoint.directory import CheckpointDirectory, find
from triaxis.engine.checkpoint.format.manifest import Ancestor, TrainingState
from triaxis.engine.checkpoint.format.store import Shard
from triaxis.engine.checkpoint.import_weights import read_tensor, whole, write_checkpoint
from triaxis.engine.checkpoint.lock import FolderLock
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS
from triaxis.engine.errors import CheckpointError, TriaxisError

STATE = TrainingState.at_start()


def test_weights_come_back_with_their_dtypes_and_shapes(tmp_path: Path) -> None:
    tensors = model() | {"half": torch.ones(2, 3).bfloat16(), "scalar": torch.tensor(2.5, dtype=torch.float64)}
    folder = write_checkpoint(
        tmp_path,
        (whole(name, values) for name, values in tensors.items()),
        STATE,
        config={"model": {"num_layers": 1}},
        source="somewhere",
        lineage=[Ancestor(path="x", step=3, loaded="all", fingerprint={})],
    )
    assert folder == tmp_path / "step_00000000"
    assert (tmp_path / "latest").read_text() == "step_00000000\n"
    manifest = find(tmp_path).manifest
    assert (manifest.content, manifest.run, manifest.config) == ("weights", "somewhere", {"model": {"num_layers": 1}})
    assert manifest.num_parameters == sum(values.numel() for values in tensors.values())
    for name, values in tensors.items():
        read = read_tensor(folder, manifest, name)
        assert (read.dtype, read.shape) == (values.dtype, values.shape)
        assert bits(read) == bits(values)


def test_a_box_is_read_without_the_rest(tmp_path: Path) -> None:
    values = torch.arange(60, dtype=torch.float64).view(3, 4, 5)
    folder = write_checkpoint(tmp_path, [whole("w", values)], STATE, config={}, source="x")
    box = ((1, 3), (0, 2), (4, 5))
    assert torch.equal(read_tensor(folder, find(tmp_path).manifest, "w", box=box), values[1:3, 0:2, 4:5])


def test_views_in_any_memory_order_are_saved_as_they_read(tmp_path: Path) -> None:
    values = torch.arange(12, dtype=torch.float64).view(3, 4)
    views = {"transposed": values.t(), "column": values[:, 1], "strided": values[::2, 1:3]}
    shards = [whole(name, view) for name, view in views.items()]
    folder = write_checkpoint(tmp_path, shards, STATE, config={}, source="x")
    for name, view in views.items():
        assert torch.equal(read_tensor(folder, find(tmp_path).manifest, name), view)


def test_training_states_have_moments(tmp_path: Path) -> None:
    state = STATE.model_copy(update={"step": 70, "num_updates": 69})
    (shards,) = training_shards(model())
    folder = write_checkpoint(tmp_path, shards, state, config={}, source="x", has_moments=True)
    manifest = find(tmp_path).manifest
    assert (manifest.content, manifest.state, set(manifest.fingerprint)) == (
        "training",
        state,
        set(OPTIMIZERS["adamw"].state_kinds),
    )
    expected = model()["final_norm.weight"] * 0.25
    assert torch.equal(read_tensor(folder, manifest, "final_norm.weight", "exp_avg_sq"), expected)


def test_shards_are_consumed_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "FILE_BYTES", 100)
    alive = 0
    most = 0

    def stream() -> Iterator[Shard]:
        nonlocal alive, most
        for number in range(10):
            alive = number - len(list(tmp_path.glob("*/part_*.safetensors"))) * 2
            most = max(most, alive)
            yield whole(f"w{number}", torch.ones(20))

    folder = write_checkpoint(tmp_path, stream(), STATE, config={}, source="x")
    assert len(list(folder.glob("part_*.safetensors"))) == 5
    assert most <= 2


def test_a_stream_that_leaves_elements_out_is_no_checkpoint(tmp_path: Path) -> None:
    box = ((0, 4),)
    with pytest.raises(CheckpointError, match="master:w: 3 elements saved of 4"):
        write_checkpoint(tmp_path, [Shard("w", "master", (4,), box, 0, torch.ones(3))], STATE, config={}, source="x")
    with pytest.raises(CheckpointError, match="exp_avg:w: 0 elements saved of 4"):
        write_checkpoint(tmp_path, [whole("w", torch.ones(4))], STATE, config={}, source="x", has_moments=True)
    assert list(tmp_path.iterdir()) == []


def test_an_error_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    commit(directory, 0)
    live = directory.partial(90, 4)
    live.mkdir()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def stream() -> Iterator[Shard]:
        yield whole("w", torch.ones(4))
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_checkpoint(tmp_path, stream(), STATE, config={}, source="x")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert live.exists(), "a run that is alive may be writing there"
    assert not directory.partial(0, 0).exists()


def test_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, [whole("w", torch.ones(4))], STATE, config={}, source="x")
    manifest = find(tmp_path).manifest
    for name, kind in (("v", "master"), ("w", "exp_avg")):
        with pytest.raises(CheckpointError, match=f"has no {kind} of {name}"):
            read_tensor(folder, manifest, name, kind)


def test_nothing_is_written_where_a_run_is_alive(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    commit(directory, 0)
    alive = FolderLock(tmp_path, "")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TriaxisError, match=r"live run is writing to .* or write into another folder"):
        write_checkpoint(tmp_path, [whole("w", torch.ones(4))], STATE, config={}, source="x")
    assert sorted(tmp_path.rglob("*")) == before
    alive.close()
    write_checkpoint(tmp_path, [whole("w", torch.ones(4))], STATE, config={}, source="x")
