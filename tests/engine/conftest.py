"""What the tests of the telemetry room share: a small config, step records, and an environment without wandb's variables."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triaxis.engine.config.tree import Config
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.telemetry.record.metrics import StepMetrics


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """A config with some sections replaced: `make_config(telemetry={"tensorboard": True})`."""

    def make(**sections: Any) -> Config:
        tree: dict[str, Any] = {
            "model": {
                "num_layers": 2,
                "hidden_size": 32,
                "num_attention_heads": 2,
                "seq_length": 16,
                "vocab_size": 257,
            },
            "data": {"synthetic": True},
            "train": {"steps": 30, "global_batch_size": 8},
            "runtime": {"runs_dir": str(tmp_path / "runs")},
        }
        return Config.model_validate(tree | sections)

    return make


@pytest.fixture
def run(make_config: Callable[..., Config], tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(make_config(), tmp_path / "runs", "demo")


@pytest.fixture
def make_metrics() -> Callable[..., StepMetrics]:
    """A step record with some fields replaced: `make_metrics(step=3, loss=1.5)`."""

    def make(**fields: Any) -> StepMetrics:
        step = fields.get("step", 1)
        values: dict[str, Any] = {
            "step": 1,
            "attempt": 0,
            "unix_time_seconds": 1.5,
            "consumed_samples": 8 * step,
            "consumed_tokens": 128 * step,
            "loss": 3.0,
            "loss_tokens": 128,
            "lr": 1e-3,
            "grad_norm": 0.5,
            "step_time_seconds": 2.0,
            "spans_seconds": {"data": 0.5, "step": 1.5},
            "tokens_per_second": 64.0,
            "model_tflops_per_device": 0.25,
            "hardware_tflops_per_device": 0.5,
            "mfu": None,
            "hfu": None,
            "peak_memory_bytes": 2**30,
        }
        return StepMetrics(**values | fields)

    return make


@pytest.fixture
def bare_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As for a user who never used wandb: no variables, no netrc, no settings."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
