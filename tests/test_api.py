"""The names of `import triaxis`, as docs/python.md has them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import triaxis
from tests.documented import ROOT
from tests.launch.small_checkpoint import LLAMA, Saved, save
from triaxis.engine.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("small"), LLAMA)


def test_the_package_is_light_until_a_name_is_used() -> None:
    script = (
        "import sys, triaxis; assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules);"
        "triaxis.load_config('gpt_tiny'); assert 'torch' not in sys.modules; print(triaxis.__version__, *dir(triaxis))"
    )
    said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split()[1:] == ["Extension", "Init", "ParamSpec", "__version__", "load_config", "open_checkpoint"]
    with pytest.raises(AttributeError, match="load_config, open_checkpoint"):
        triaxis.train  # noqa: B018


def test_a_configuration_is_loaded_by_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    by_name = triaxis.load_config("gpt_tiny", ["train.steps=70"])
    assert by_name.train.steps == 70
    assert by_name == triaxis.load_config(ROOT / "configs" / "gpt_tiny.yaml", ["train.steps=70"])
    # A file of that name is the user's own.
    Path("gpt_tiny").write_text("model: {num_layers: 1}\n")
    with pytest.raises(ConfigError, match="train"):
        triaxis.load_config("gpt_tiny")
    with pytest.raises(ConfigError, match="Did you mean llama3_8b"):
        triaxis.load_config("llama3_8")


def test_a_checkpoint_is_a_mapping_of_whole_tensors(small: Saved) -> None:
    checkpoint = triaxis.open_checkpoint(small.folder)
    assert set(checkpoint) == set(small.weights) and len(checkpoint) == len(small.weights)
    for name, tensor in checkpoint.items():
        assert checkpoint.shapes[name] == tuple(tensor.shape)
        assert torch.equal(tensor, small.weights[name].to(tensor.dtype))
    assert checkpoint.config["model"]["num_layers"] == small.config.model.num_layers
    assert checkpoint.step == 0 and checkpoint.path.name == "step_00000000"
    with pytest.raises(KeyError):
        checkpoint["no.such.weight"]
    with pytest.raises(CheckpointError, match="no moving average"):
        triaxis.open_checkpoint(small.folder, weights="ema")
