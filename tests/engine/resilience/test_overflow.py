"""Gradients of an fp16 run that overflow, through the real loop: no divergence, no loss of a spike's history, kept by a resume."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.resilience.runs import Plant, Trace, run
from tests.harness import run_ranks
from tests.parity.cases import Case
from triaxis.engine.checkpoint.format.manifest import LossScaleRecord, read_manifest

pytestmark = pytest.mark.distributed

CASE = Case("llama", num_layers=2, dp=2)
BATCH, NUM_STEPS, CUT = CASE.global_batch_size, 8, 4
BAD_STEPS = (1, 3, 5)
LAST_OF_BATCH = BATCH - 1
PLANT = Plant(
    1, "blocks.1.mlp", tuple(step * BATCH + LAST_OF_BATCH for step in BAD_STEPS), factor=1e9, in_backward=True
)
"""On rank 1, which reads the last sample of each batch in both layouts."""

SCALE = {"initial": 4096.0, "window": 2, "hysteresis": 2}
SCALES = [4096.0, 4096.0, 4096.0, 4096.0, 2048.0, 2048.0, 1024.0, 1024.0]
"""The second overflow halves, and the third. The window is whole in the last step, so what follows would have doubled."""


def sections(**checkpoint: Any) -> dict[str, dict[str, Any]]:
    return {
        "train": {"steps": NUM_STEPS, "micro_batch_size": 4},
        "optimizer": {"decay_steps": NUM_STEPS},
        "precision": {"dtype": "fp16", "loss_scale": SCALE},
        "resilience": {"on_nonfinite": "stop", "loss_spike": 1.5},
        "checkpoint": {"interval": CUT, "keep_last": None} | checkpoint,
    }


def check(traces: list[Trace], first: int) -> None:
    """The scales and the skipped steps of a run that began with step `first`."""
    expected = [(scale, step in BAD_STEPS) for step, scale in enumerate(SCALES)]
    for trace in traces:
        assert trace.error == "" and trace.events == []
        assert trace.scales == expected[first:]
        assert trace.num_updates == NUM_STEPS - len(BAD_STEPS)
        good = [step for step in range(NUM_STEPS) if step not in BAD_STEPS]
        assert [step for step, _ in trace.history.losses] == good


def test_an_overflow_is_no_divergence_and_its_scale_is_resumed(tmp_path: Path) -> None:
    straight: list[Trace] = run_ranks(run, 2, CASE, str(tmp_path / "straight"), sections(), PLANT)
    check(straight, 0)
    assert read_manifest(tmp_path / "straight" / "step_00000004").state.loss_scale == LossScaleRecord(
        scale=2048.0, updates=0, hysteresis=0
    )
    for name, case in (("again", CASE), ("tp", Case("llama", num_layers=2, tp=2))):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "straight", folder)
        shutil.rmtree(folder / f"step_{NUM_STEPS:08d}")
        (folder / "latest").write_text(f"step_{CUT:08d}\n")
        traces: list[Trace] = run_ranks(run, 2, case, str(folder), sections(), PLANT, 1)
        check(traces, CUT)
        if case == CASE:
            assert traces[0].told == straight[0].told[CUT:] and traces[0].fingerprint == straight[0].fingerprint


def test_a_rollback_restores_the_scale_of_its_checkpoint(tmp_path: Path) -> None:
    """The scale has doubled between the checkpoint and the step that is undone, and doubles again after it."""
    bad = 6
    changed: dict[str, dict[str, Any]] = {
        "precision": {"dtype": "fp16", "loss_scale": {"initial": 64.0, "window": 2, "hysteresis": 2}},
        "resilience": {"on_nonfinite": "rollback"},
    }
    plant = Plant(1, "blocks.1.mlp", (bad * BATCH + LAST_OF_BATCH,))
    traces: list[Trace] = run_ranks(run, 2, CASE, str(tmp_path / "back"), sections() | changed, plant)
    doubling = [64.0, 64.0, 128.0, 128.0, 256.0, 256.0]
    again = [256.0, 256.0, 512.0, 512.0]
    for trace in traces:
        assert trace.error == "" and [(kind, step) for kind, step, *_ in trace.events] == [
            ("non_finite", bad),
            ("rolled_back", bad),
        ]
        assert [step for step, _ in trace.told] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
        assert trace.scales == [(scale, False) for scale in doubling + again]
        assert trace.num_updates == NUM_STEPS
    assert read_manifest(tmp_path / "back" / f"step_{NUM_STEPS:08d}").state.loss_scale == LossScaleRecord(
        scale=1024.0, updates=0, hysteresis=2
    )
