"""Safetensors files written tensor by tensor, and folders that are there whole."""

import json
from pathlib import Path

import pytest
import torch

from triaxis.engine.errors import CheckpointError
from triaxis.models.interop.huggingface.files import TensorPlan, WeightFiles, whole_folder, write_weights


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = WeightFiles(folder)
    return {name: files.read(name) for name in files.tensors}


def test_files_are_cut_at_the_limit(tmp_path: Path) -> None:
    """Twelve bytes to a file: two fit, one of 16 has its own, and an index says where each is."""
    sizes = {"a": 2, "b": 1, "c": 4, "d": 2}
    plans = [TensorPlan(name, (size,), "F32") for name, size in sizes.items()]
    tensors = [(name, torch.arange(size, dtype=torch.float64)) for name, size in sizes.items()]
    files = write_weights(tmp_path, plans, tensors, shard_bytes=12)
    assert [path.name for path in files] == [
        *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    weight_map = json.loads(files[-1].read_text())["weight_map"]
    assert [weight_map[name][:11] for name in sizes] == ["model-00001", "model-00001", "model-00002", "model-00003"]
    assert json.loads(files[-1].read_text())["metadata"]["total_size"] == 36
    for name, tensor in all_tensors(tmp_path).items():
        assert torch.equal(tensor, torch.arange(sizes[name], dtype=torch.float32))


def test_every_tensor_starts_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    """Readers that map a file look at its bytes as elements; three bf16 come first here, and must not displace the others."""
    plans = [TensorPlan("a", (3,), "BF16"), TensorPlan("b", (5,), "F32"), TensorPlan("c", (1,), "F64")]
    (path,) = write_weights(tmp_path, plans, [(plan.name, torch.ones(plan.shape)) for plan in plans])
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for plan in plans:
        assert (start + header[plan.name]["data_offsets"][0]) % (plan.num_bytes // plan.shape[0]) == 0, plan
    assert {name: tensor.numel() for name, tensor in all_tensors(tmp_path).items()} == {"a": 3, "b": 5, "c": 1}


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with pytest.raises(CheckpointError, match="could not be written: full"), whole_folder(out) as partial:
        (partial / "half").write_text("x")
        raise OSError("full")
    assert not out.exists() and not list(out.parent.iterdir())
    dead = out.with_name("out.converting.partial")
    dead.mkdir()
    (dead / "left_by_a_kill").write_text("x")
    with whole_folder(out) as partial:
        (partial / "whole").write_text("x")
        assert not out.exists()
    assert [path.name for path in out.iterdir()] == ["whole"]
    assert list(out.parent.iterdir()) == [out]
    with pytest.raises(CheckpointError, match="is there already and is not empty"), whole_folder(out):
        raise AssertionError("not reached")
