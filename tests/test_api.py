"""The names of `import triaxis`, as docs/training.md has them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import triaxis
from tests.documented import ROOT
from tests.harness import run_ranks
from tests.launch.small_checkpoint import LLAMA, Saved, save
from triaxis.engine.config.write import to_yaml
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
    assert said.split()[1:] == [
        "Extension",
        "Init",
        "ModelConfig",
        "OwnCosts",
        "ParamSpec",
        "__version__",
        "load_config",
        "open_checkpoint",
        "train",
    ]
    with pytest.raises(AttributeError, match="load_config, open_checkpoint"):
        triaxis.trains  # noqa: B018


def test_an_extension_may_import_names_from_the_modules_that_had_them() -> None:
    from triaxis.engine.config.extension import Extension, OwnCosts
    from triaxis.engine.config.model import ModelConfig

    assert (Extension, OwnCosts, ModelConfig) == (triaxis.Extension, triaxis.OwnCosts, triaxis.ModelConfig)


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


def trained(rank: int, folder: str, extension: str) -> tuple[list[float], list[float], str]:
    os.chdir(folder)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        os.environ.pop(name, None)
    config = triaxis.load_config(None, SMALL)
    first = triaxis.train(config, ["runtime.name=a"])
    (Path(folder) / "small.yaml").write_text(to_yaml(config))
    other = triaxis.train("small.yaml", ["optimizer.lr_schedule=extension"], extension=extension)
    record = (other.directory / "metrics.jsonl").read_text().splitlines()[-1]
    assert first.exit_code == 0 and str(first.directory) == "runs/a" and str(other.directory) == "runs/small"
    return first.losses.tolist(), other.losses.tolist(), record


SMALL = [
    "model={num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 8, vocab_size: 40}",
    "data={synthetic: true}",
    "train={steps: 3, global_batch_size: 2, micro_batch_size: 2}",
    "optimizer={lr: 0.01, lr_schedule: constant}",
    "checkpoint={interval: never}",
    "eval={interval: null}",
    "precision={dtype: fp32}",
]
EXTENSION = """
from triaxis import Extension
from triaxis.engine.telemetry.meters.step_meter import StepMeter
from triaxis.engine.telemetry.record.metrics import Measured

class Half(StepMeter):
    def read(self, step, result):
        return Measured({"half_of_the_loss": result.loss / 2})

def falling(consumed_tokens, step_tokens, optimizer, num_tokens):
    return optimizer.lr * (1 - consumed_tokens / num_tokens)

extension = Extension(schedule=falling, meters=[Half.of])
"""


@pytest.mark.distributed
def test_a_script_trains_and_has_the_losses(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(EXTENSION)
    ((first, other, text),) = run_ranks(trained, 1, str(tmp_path), str(path))
    assert len(first) == len(other) == 3
    # The rates are equal before the second update, and the loss of a step is that before its own.
    assert first[:2] == other[:2] and first[2] != other[2]
    record = json.loads(text)
    assert record["half_of_the_loss"] == other[2] / 2 and record["lr"] == pytest.approx(0.01 / 3)
