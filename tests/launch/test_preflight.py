"""What the launcher says before it starts ranks that would only say the same."""

from pathlib import Path

import pytest

from engine.config import Config
from engine.config_load import load_config
from engine.errors import DataError, TriaxisError
from engine.telemetry.run_dir import RunDirectory
from launch.preflight import look_before_training

TINY = Path(__file__).resolve().parents[2] / "configs" / "gpt_tiny.yaml"


def config(tmp_path: Path, *overrides: str) -> Config:
    return load_config(TINY, [f"runtime.runs_dir={tmp_path / 'runs'}", "runtime.name=run", *overrides])


def test_a_missing_corpus_is_named_and_leaves_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        look_before_training(config(tmp_path, f'data.train=[[1.0, "{tmp_path / "nowhere"}"]]'), TINY)
    assert not (tmp_path / "runs").exists()


def test_a_new_run_may_start(tmp_path: Path) -> None:
    assert look_before_training(config(tmp_path, "data.synthetic=true"), TINY) is None
    assert not (tmp_path / "runs").exists()


def test_a_finished_run_says_so_and_another_config_is_refused(tmp_path: Path) -> None:
    synthetic = config(tmp_path, "data.synthetic=true")
    directory = RunDirectory.create(synthetic, synthetic.runtime.runs_dir, "run")
    directory.metrics.write_text('{"step": 1}\n')
    assert look_before_training(synthetic, TINY) is None, "an unfinished run starts its next attempt"
    directory.finish(steps=240, loss=1.5, val_loss=None)
    directory.close()
    message = look_before_training(synthetic, TINY)
    assert message is not None
    assert "finished (steps 240, loss 1.5000)" in message
    with pytest.raises(TriaxisError, match=r"train\.seed: 1234 there, 5 here"):
        look_before_training(config(tmp_path, "data.synthetic=true", "train.seed=5"), TINY)
