"""Frozen parameters in checkpoints: they are saved as weights, go over between layouts, and may be frozen or trained on resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import engine_of, run
from tests.harness import run_ranks
from tests.parity.cases import Case, owned_pieces
from triaxis.engine.checkpoint.directory import CheckpointDirectory, find
from triaxis.engine.checkpoint.format.manifest import MANIFEST
from triaxis.engine.checkpoint.resume import ResumePoint, resume_or_start
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS
from triaxis.engine.errors import CheckpointError
from triaxis.engine.step import Engine

FROZEN = ("embedding.*", "layers.0.*", "*.up.weight")
SMALL: dict[str, Any] = {"num_layers": 4, "global_batch_size": 4}
TRAINED, PARTLY = Case("gpt_untied", **SMALL), Case("gpt_untied", frozen=FROZEN, **SMALL)
ACCEPTED = {"accept": ["optimizer.groups"]}
MOMENTS = [kind for kind in OPTIMIZERS["adamw"].state_kinds if kind != "master"]


def resumed(case: Case, folder: Path, section: dict[str, Any] = ACCEPTED) -> tuple[Engine, ResumePoint]:
    engine = engine_of(0, case, section)
    return engine, resume_or_start(engine, CheckpointDirectory(folder), has_saved=True, data={"samples": "same"})


def moments(engine: Engine) -> dict[str, torch.Tensor]:
    """The sum of the moments' magnitudes of each trained parameter."""
    found: dict[str, torch.Tensor] = {}
    for owned in engine.optimizer.trained:
        for segment in owned.segments:
            at = segment.offset - owned.bucket.owned[0]
            parts = [owned.state.read(kind)[at : at + segment.stop - segment.start] for kind in MOMENTS]
            found[segment.record.name] = found.get(segment.record.name, torch.zeros(())) + sum(
                part.abs().sum() for part in parts
            )
    return found


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {piece.name: piece.values for piece in owned_pieces(engine, "master")}


def averages(engine: Engine) -> dict[str, torch.Tensor]:
    found = {}
    for owned in engine.optimizer.trained:
        for segment in owned.segments:
            at = segment.offset - owned.bucket.owned[0]
            found[segment.record.name] = owned.state.read("ema")[at : at + segment.stop - segment.start]
    return found


def test_what_is_frozen_has_weights_alone(tmp_path: Path) -> None:
    run(0, PARTLY, str(tmp_path), 2, 0, {"interval": 2})
    described = json.loads((find(tmp_path).folder / MANIFEST).read_text())["tensors"]
    frozen = {name for name, info in described.items() if "is_trained" in info}
    assert {"embedding.word.weight", "layers.0.attention.norm.bias", "layers.3.mlp.up.weight"} <= frozen
    assert not frozen & {"layers.1.attention.q.weight", "layers.3.mlp.up.bias", "head.weight"}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "pp": 2, "bucket_bytes": 5000},
        pytest.param({"tp": 2, "pp": 2, "bucket_bytes": 300, "sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param({"pp": 4, "dp": 2, "micro_batch_size": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 4}, marks=pytest.mark.slow),
    ],
)
def test_another_layout_continues(layout: dict[str, Any], tmp_path: Path) -> None:
    case = Case("gpt_untied", frozen=FROZEN, **SMALL, **layout)
    before = run(0, PARTLY, str(tmp_path), 2, 0, {"interval": 2}, look_at=(2,))
    section = {"load": str(tmp_path), "interval": 100}
    alone = run(0, PARTLY, str(tmp_path / "one"), 4, 0, section)
    traces = run_ranks(run, case.world_size, case, str(tmp_path / "many"), 4, 0, section, (2,))
    assert all(trace.fingerprints[2] == before.fingerprints[2] for trace in traces)
    assert traces[0].losses == pytest.approx(alone.losses, rel=1e-9)


@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=pytest.mark.slow), "bf16"])
def test_a_run_is_frozen_in_part_and_trains_all_again(dtype: str, tmp_path: Path) -> None:
    trained, partly = (
        Case("gpt_untied", frozen=frozen, dtype=dtype, ema=0.5, **SMALL)
        for frozen in ((), ("layers.0.*", "*.up.weight"))
    )
    run(0, trained, str(tmp_path), 2, 0, {"interval": 2})
    with pytest.raises(CheckpointError, match=r"optimizer\.groups"):
        resumed(partly, tmp_path, {})
    engine, point = resumed(partly, tmp_path)
    assert any("attention" in line and "moments are discarded" in line for line in point.differences), point.differences
    start = weights(engine)
    assert all(moments(engine).values()) and "layers.0.mlp.up.weight" not in moments(engine)

    run(0, partly, str(tmp_path), 4, 1, {"interval": 2} | ACCEPTED)
    engine, point = resumed(trained, tmp_path)
    assert point.state.step == 4
    assert any("moments begin at zero" in line for line in point.differences), point.differences
    now, sums, average = weights(engine), moments(engine), averages(engine)
    for name in ("layers.0.mlp.up.weight", "layers.2.mlp.up.weight", "layers.0.attention.norm.weight"):
        assert now[name].equal(start[name]) and not sums[name] and average[name].equal(now[name]), name
    for name in ("embedding.word.weight", "layers.1.mlp.down.weight"):
        assert not now[name].equal(start[name]) and sums[name] and not average[name].equal(now[name]), name
