"""The copy that a checkpoint is written from: as many bytes as the state has, in its own form, and the same files."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_contenders.shapes import SHAPES, base_words, resolve, write_config
from triaxis.engine.checkpoint.format.manifest import DataFile
from triaxis.engine.checkpoint.format.store import write_file
from triaxis.engine.checkpoint.shards import saved_buckets, shards
from triaxis.engine.checkpoint.writer import RankWriter
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.schema.training import PrecisionConfig
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS
from triaxis.engine.device import pinned_memory
from triaxis.engine.layout.rank_grid import RankGrid
from triaxis.engine.optimizer.distributed import DistributedOptimizer
from triaxis.engine.step import Engine
from triaxis.engine.train import build
from triaxis.models.gpt.chunk import build_chunks
from triaxis.models.predict.rank_memory import resolve_recompute
from triaxis.models.specs import model_specs

FORMS: Mapping[str, tuple[PrecisionConfig, int]] = {
    "full": (PrecisionConfig(dtype="bf16"), 4 + 4 + 4),
    "split masters": (PrecisionConfig(dtype="bf16", masters="split"), (2 + 2) + 4 + 4),
    "bf16 moments": (PrecisionConfig(dtype="bf16", moments="bf16"), 4 + 2 + 2),
    "split masters, bf16 moments": (PrecisionConfig(dtype="bf16", masters="split", moments="bf16"), (2 + 2) + 2 + 2),
}
"""Forms of the state of a bf16 run, and bytes per parameter: of the master (a split one needs the weight too) and two moments."""


class RecordingLock:
    """Page lock that records how many bytes are locked."""

    def __init__(self) -> None:
        self.locked: list[int] = []

    def lock(self, memory: torch.Tensor) -> None:
        self.locked.append(memory.nbytes)

    def unlock(self, memory: torch.Tensor) -> None:
        raise AssertionError("a writer's end may follow an error, and unlocking waits for the device")


def built(shape: str, device: torch.device, folder: Path) -> Engine:
    """Build the engine of one process that holds a whole model of the benchmarks, in bf16."""
    path = write_config(
        folder, SHAPES[shape], corpus=folder, micro_batch_size=1, num_steps=1, dtype="bf16", device="cpu"
    )
    config = resolve(path, base_words(SHAPES[shape], "cpu"))
    topology = Topology(RankGrid(parallel_sizes(config, 1)), 0, device)
    return build(resolve_recompute(config, topology.sizes), topology, build_chunks, fill=lambda parameters, seed: None)


def writer_of(optimizer: DistributedOptimizer, lock: RecordingLock, *, in_background: bool = True) -> RankWriter:
    def fail(error: OSError) -> None:
        raise error

    return RankWriter(optimizer, 0, in_background, fail, lock)


@pytest.mark.parametrize("shape", ["gpt-1.3b", "llama-8b-4k"])
def test_a_large_model_asks_for_the_bytes_of_its_state(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the meta device have no memory, so what would be locked is recorded and nothing is allocated."""
    meta = torch.device("meta")
    monkeypatch.setattr(
        pinned_memory, "aligned_buffer", lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device=meta)
    )
    engine = built(shape, meta, tmp_path)
    numel = sum(torch.Size(spec.shape).numel() for spec in model_specs(engine.config.model))
    for name, (precision, bytes_per_parameter) in FORMS.items():
        lock = RecordingLock()
        optimizer = DistributedOptimizer(engine.buffers, engine.config.optimizer, precision)
        writer = writer_of(optimizer, lock)
        (num_bytes,) = lock.locked
        assert 1 <= num_bytes / (bytes_per_parameter * numel) <= 1.01, name
        writer.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_small_model_locks_the_bytes_of_its_state_once(form: str, tmp_path: Path) -> None:
    engine = built("tiny", torch.device("cpu"), tmp_path)
    precision, bytes_per_parameter = FORMS[form]
    lock = RecordingLock()
    writer = writer_of(DistributedOptimizer(engine.buffers, engine.config.optimizer, precision), lock)
    for number in range(3):
        writer.save(tmp_path / f"save_{number}").result(60)
    writer.close()
    (num_bytes,) = lock.locked
    # Padding of the vocabulary and of buckets is copied as well; of this model it is 4 %.
    numel = sum(buffer.weights[0].numel() for buffer in engine.buffers.buffers)
    assert 1 <= num_bytes / (bytes_per_parameter * numel) <= 1.01


def test_nothing_is_locked_where_training_waits(tmp_path: Path) -> None:
    lock = RecordingLock()
    writer_of(built("tiny", torch.device("cpu"), tmp_path).optimizer, lock, in_background=False).close()
    assert lock.locked == []


def drawn(optimizer: DistributedOptimizer) -> None:
    """Give every element of the state a value of its own."""
    generator = torch.Generator().manual_seed(3)
    for owned in optimizer.owned:
        owned.state.write(
            {kind: torch.randn(len(owned.parameters), generator=generator) for kind in OPTIMIZERS["adamw"].state_kinds}
        )


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_holds_the_state_in_the_accumulation_dtype_as_it_was_at_the_save(
    form: str, in_background: bool, tmp_path: Path
) -> None:
    engine = built("tiny", torch.device("cpu"), tmp_path)
    optimizer = DistributedOptimizer(engine.buffers, engine.config.optimizer, FORMS[form][0])
    drawn(optimizer)
    owned = saved_buckets(optimizer)
    widened = [
        shard
        for kind in OPTIMIZERS["adamw"].state_kinds
        for each in owned
        for shard in shards(each, each.state.read(kind), kind)
    ]
    write_file(tmp_path / "rank_00000.safetensors", widened)

    writer = writer_of(optimizer, RecordingLock(), in_background=in_background)
    if in_background:
        # The thread begins when training has changed the state already.
        may_begin = threading.Event()
        writer._thread.submit(may_begin.wait, 60)
        saving = writer.save(tmp_path / "saved")
        for buffer in engine.buffers.buffers:
            buffer.weights[0].zero_()
        for tensor in (tensor for each in owned for tensor in each.state.beside.values()):
            tensor.zero_()
        may_begin.set()
    else:
        saving = writer.save(tmp_path / "saved")
    saving.result(60)
    writer.close()
    file = DataFile.model_validate_json((tmp_path / "saved" / "rank_00000.json").read_bytes())
    saved = tmp_path / "saved" / file.name
    assert saved.read_bytes() == (tmp_path / "rank_00000.safetensors").read_bytes()
    assert {piece.dtype for piece in file.pieces} == {"float32"}
