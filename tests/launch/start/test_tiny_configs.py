"""The configs of first runs prepare their corpus; the default one is worth the GPUs that are there; what a start prints."""

import io
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from triaxis.engine.device.gpus import NCCL, Gpus
from triaxis.engine.telemetry.record.peaks import known_peak
from triaxis.launch.start import launcher
from triaxis.models.predict.fit import Devices

WHERE_TO_STOP = 7
"""The code with which the stand-in for `triaxis prepare` ends."""


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the corpora that were prepared, from a folder without any."""
    paths: list[str] = []

    def prepare(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        paths.append(command[command.index("--output") + 1])
        return subprocess.CompletedProcess(command, WHERE_TO_STOP)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher.subprocess, "run", prepare)
    return paths


@pytest.mark.parametrize("path", launcher.STDLIB_CONFIGS, ids=lambda path: path.stem)
def test_a_tiny_config_prepares_its_corpus(path: Path, prepared: list[str]) -> None:
    assert launcher.launch(launcher.Request(path, (), trains=True), {}) == WHERE_TO_STOP
    assert prepared == ["data/stdlib/bytes"]


def test_other_data_is_left_alone(prepared: list[str]) -> None:
    """Neither data that an override names nor another program's run is prepared."""
    stops = {"preflight": lambda config, path: "seen"}
    own = launcher.Request(launcher.DEFAULT_CONFIG, ("data.tokenizer=bytes",), trains=True, **stops)
    other = launcher.Request(launcher.DEFAULT_CONFIG, (), worker="triaxis.launch.footprint.traffic", **stops)
    assert [launcher.launch(request, {}) for request in (own, other)] == [0, 0]
    assert prepared == []


def test_the_environment_deals_out_experts() -> None:
    path = launcher.DEFAULT_CONFIG.with_name("moe_tiny.yaml")
    sizes = launcher.make_plan(launcher.Request(path, ()), {"EP": "2", "ETP": "2"}).sizes
    assert (sizes.ep, sizes.etp, sizes.world_size) == (2, 2, 8)


SMALLEST_CARD = 24 * 10**9
DEFAULT = launcher.Request(None, (), trains=True)


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(launcher, "find_gpus", lambda variables: Gpus(count))
    monkeypatch.setattr(launcher, "read_devices", lambda variables: Devices(SMALLEST_CARD, count))


@pytest.mark.parametrize("count", range(1, 9))
def test_the_default_run_is_worth_the_gpus(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has gpt_125m's layers in bf16, and fits the smallest card: the plan would be refused else."""
    with_gpus(monkeypatch, count)
    plan = launcher.make_plan(DEFAULT, {})
    model = plan.config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.vocab_size) == (12, 768, 12, 257)
    assert known_peak("NVIDIA H100 80GB HBM3", plan.config.precision.dtype) is not None, "its lines have MFU"
    # 24 microbatches.
    assert plan.world.size == {5: 4, 7: 6}.get(count, count) and plan.world.backend == NCCL
    assert plan.memory.endswith(" of 24.0 GB")


def test_without_gpus_the_default_run_is_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    assert launcher.make_plan(DEFAULT, {}).config_path == launcher.DEFAULT_CONFIG
    with_gpus(monkeypatch, 8)
    on_cpu = launcher.Request(None, ("runtime.device=cpu",), trains=True)
    assert launcher.make_plan(on_cpu, {}).config_path == launcher.DEFAULT_CONFIG


def test_the_next_command_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_gpus(monkeypatch, 1)
    monkeypatch.chdir(launcher.DEFAULT_CONFIG.parents[1])
    monkeypatch.setattr(launcher, "_run_phases", lambda plan, arguments, environment: 0)
    synthetic = ("data.synthetic=true", "eval.interval=null")
    assert launcher.launch(launcher.Request(None, synthetic, trains=True), {}) == 0
    assert "triaxis bench configs/gpt_125m_bytes.yaml " in capsys.readouterr().out.splitlines()[-1]
    own = launcher.Request(launcher.GPU_CONFIG, synthetic, trains=True)
    assert launcher.launch(own, {}) == 0 and "triaxis bench" not in capsys.readouterr().out


def shown(request: launcher.Request, **terminal: Any) -> list[str]:
    screen, plan = io.StringIO(), launcher.make_plan(request, {})
    arguments = launcher.torchrun_arguments(plan, request.worker, {})
    console = Console(file=screen, highlight=False, soft_wrap=True, color_system=None, **terminal)
    launcher.show(console, request, plan, arguments, {"ONE": "a b", "TWO": "2"})
    return screen.getvalue().splitlines()


def test_a_start_leaves_to_rank_0_what_it_says_in_its_turn() -> None:
    quiet, dry = launcher.Request(None, ()), launcher.Request(None, (), dry_run=True)
    assert [line.split()[0] for line in shown(quiet)] == ["config", "ranks"]
    other = launcher.Request(None, (), worker="triaxis.launch.footprint.traffic")
    assert [line.split()[0] for line in shown(other)] == ["config", "ranks", "layout", "batch"]
    assert [line.split()[0] for line in shown(launcher.Request(None, (), verbose=True))] == [
        "config",
        "ranks",
        "launch",
    ]
    assert [line.split()[0] for line in shown(dry)] == ["config", "ranks", "layout", "batch", "launch"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_on_a_terminal_lines_end_between_words_and_can_be_pasted(width: int) -> None:
    dry = launcher.Request(None, (), dry_run=True)
    narrow = shown(dry, width=width, force_terminal=True)
    assert all(len(line) <= width or " " not in line[8:].removesuffix(" \\") for line in narrow)
    command = "\n".join(line[8:] for line in narrow[[line.startswith("launch") for line in narrow].index(True) :])
    (whole,) = [line[8:] for line in shown(dry) if line.startswith("launch")]
    command = command.replace(" \\\n", " ")
    assert "\n" not in command, "each line but the last continues"
    assert shlex.split(command) == shlex.split(whole) and "ONE=a b" in shlex.split(whole)
