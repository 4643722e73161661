"""`triaxis bench --device`: what it writes is a device that predictions read, with the rates that were measured."""

from pathlib import Path

import pytest
import torch
import yaml

from tests.parity.cases import Case
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.launch.cli import main
from triaxis.launch.tuning import calibrate
from triaxis.models.predict.device import load_device
from triaxis.models.predict.step_time.cluster import Cluster
from triaxis.models.predict.step_time.estimate import Estimator


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a few shapes, briefly."""
    for name, values in (("TOKENS", (32, 64)), ("WIDTHS", (16, 64)), ("LENGTHS", (16, 64)), ("HEAD_SIZES", (16,))):
        monkeypatch.setattr(calibrate, name, values)
    monkeypatch.setattr(calibrate, "ROUND_SECONDS", 0.002)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("quick")
def test_a_measured_device_predicts_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    assert main(["bench", "--device", "cpu", "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    device = load_device(path)
    assert device.name == "mine" and device.memory_gb > 0.5 and device.collective_us > 0
    assert device.host_gb_per_s > 0 and not device.copies_beside
    assert {row.dtype for row in device.gemm} == {"bf16", "fp32"}
    assert {(row.direction, row.seq) for row in device.attention} == {
        (direction, seq) for direction in ("forward", "backward") for seq in (16, 64)
    }
    largest = max((row for row in device.gemm if row.dtype == "fp32"), key=lambda row: row.m * row.n * row.k)
    assert device.gemm_tflops(largest.m, largest.n, largest.k, "fp32") == pytest.approx(largest.tflops)

    cluster = Cluster(**yaml.safe_load(printed.split("cluster of two ranks:")[1]))
    assert cluster.num_gpus == 2 and cluster.device == str(path)
    config: Config = Case("gpt", tp=2, dtype="fp32").config()
    alone, cut = (Estimator(cluster).simulated(config, ParallelSizes(tp=tp)) for tp in (1, 2))
    assert "tp" in cut.components and cut.components["tp"] > alone.components.get("tp", 0.0) == 0.0


@pytest.mark.slow
def test_ranks_beside_it_slow_a_cpu() -> None:
    """As many processes as there are cores, and one more: each gets less of them."""
    torch.set_num_threads(1)
    x = torch.randn(128, 128)
    alone = calibrate._seconds(lambda: torch.mm(x, x), torch.device("cpu"))
    with calibrate.company(2 * torch.multiprocessing.cpu_count()):
        crowded = calibrate._seconds(lambda: torch.mm(x, x), torch.device("cpu"))
    assert crowded > alone


@pytest.mark.parametrize(
    ("words", "explained"),
    [
        (["--device", "--output", "mine.json"], "a device's file ends in .yaml"),
        (["--device"], "--device without --output"),
        (
            ["gpt_tiny", "--device", "--output", "mine.yaml", "--layouts", "tp=2"],
            "gpt_tiny.yaml, --layouts: the device is",
        ),
        (["gpt_tiny", "--name", "mine"], "--name without --device"),
        (["gpt_tiny", "--output", "mine.yaml"], "numbers end in .json"),
        ([], "bench needs a config"),
    ],
)
def test_words_that_do_not_fit_together(
    words: list[str],
    explained: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == ConfigError.exit_code
    assert explained in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
