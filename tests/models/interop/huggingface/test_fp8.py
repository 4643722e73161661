"""FP8 weights with a scale per block: read as their definition says, and what is quantized otherwise is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.interop.huggingface.test_mtp import save_with_mtp
from tests.models.interop.huggingface.test_weights import all_tensors, assert_identical, exported, imported, rewrite
from triaxis.engine.errors import CheckpointError, ConfigError
from triaxis.models.interop.huggingface.weights import open_folder

BLOCK = (8, 16)
"""Neither divides all the sizes of the small model."""

QUANTIZATION: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": list(BLOCK),
}
PROJECTION = "model.layers.2.mlp.experts.3.up_proj.weight"


def blocks(rows: int, columns: int) -> list[tuple[slice, slice]]:
    return [
        (slice(row, row + BLOCK[0]), slice(column, column + BLOCK[1]))
        for row in range(0, rows, BLOCK[0])
        for column in range(0, columns, BLOCK[1])
    ]


@pytest.fixture
def published(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A folder `tmp_path` as DeepSeek publishes them; its tensors as the definition expands them, block by block."""
    save_with_mtp(tmp_path, num_ahead=1)
    from safetensors.torch import save_file

    stored, expanded = {}, {}
    for name, tensor in all_tensors(tmp_path).items():
        stored[name] = expanded[name] = tensor.bfloat16()
        if not name.endswith("_proj.weight") or "layers" not in name:
            continue
        rows, columns = tensor.shape
        stored[name] = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scales = []
        for place in blocks(rows, columns):
            # e4m3 ends at 448.
            scales.append(tensor[place].float().abs().max() / 448)
            stored[name][place] = (tensor[place].float() / scales[-1]).to(torch.float8_e4m3fn)
            expanded[name][place] = (stored[name][place].float() * scales[-1]).bfloat16()
        stored[f"{name}_scale_inv"] = torch.stack(scales).view(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    save_file(stored, tmp_path / "model.safetensors")
    keys = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(keys | {"quantization_config": QUANTIZATION}))
    return expanded


def test_blocks_are_expanded_by_their_definition_and_leave_as_bf16(
    published: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    scales = all_tensors(tmp_path)[f"{PROJECTION}_scale_inv"]
    assert scales.shape == (2, 2) and len(scales.unique()) == 4, "another order of blocks would be seen"
    count = sum(name.endswith("_scale_inv") for name in all_tensors(tmp_path))
    note = f"{count} tensors are FP8 with a scale per 8 x 16 block and were expanded to bf16"
    assert open_folder(tmp_path).notes == (note,)
    ahead = [name for name in all_tensors(tmp_path) if "layers.3." in name and name.endswith("_scale_inv")]
    assert "model.layers.3.eh_proj.weight_scale_inv" in ahead and len(ahead) == 5 + 3 * (8 + 1)
    target = exported(imported(tmp_path, tmp_path / "ours"), tmp_path / "target")
    assert_identical(all_tensors(target), published)
    assert "quantization_config" not in json.loads((target / "config.json").read_text())


def test_scales_that_are_missing_or_of_another_shape_are_named(
    published: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    scale = f"{PROJECTION}_scale_inv".replace(".", "__")
    rewrite(tmp_path, **{scale: torch.ones(2, 3)})
    with pytest.raises(CheckpointError, match=rf"{PROJECTION}_scale_inv has the shape \[2, 3\].*\[2, 2\] blocks"):
        open_folder(tmp_path)
    rewrite(tmp_path, **{scale: None})
    with pytest.raises(CheckpointError, match=rf"{PROJECTION}_scale_inv is missing"):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"quant_method": "mxfp4"}, {"fmt": "e5m2"}, {"weight_block_size": None}, {"weight_block_size": [128]}],
)
def test_other_quantizations_are_refused(
    change: dict[str, Any], published: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    keys = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(keys | {"quantization_config": QUANTIZATION | change}))
    with pytest.raises(
        ConfigError, match=r"quantization_config = .*only FP8 \(e4m3\) with a weight_block_size is read"
    ):
        open_folder(tmp_path)


def test_fp8_without_its_key_is_refused(published: dict[str, torch.Tensor], tmp_path: Path) -> None:
    keys = json.loads((tmp_path / "config.json").read_text())
    del keys["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(CheckpointError, match="is F8_E4M3; weights may be BF16"):
        open_folder(tmp_path)
