"""Checkpoints of released formats stay readable: the folders in tests/golden/ are never written again."""

from pathlib import Path

import pytest
import torch

from tests.engine.checkpoint.format import golden
from triaxis.engine.checkpoint.directory import find
from triaxis.engine.checkpoint.format.manifest import Kind
from triaxis.engine.checkpoint.import_weights import read_tensor
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS
from triaxis.launch.inspect.check import check_files

VERSION_1 = Path(__file__).resolve().parents[3] / "golden" / "checkpoint_v1"


def test_version_1_says_what_it_said() -> None:
    candidate = find(VERSION_1)
    manifest = candidate.manifest
    assert candidate.folder.name == "step_00000007"
    assert (manifest.format_version, manifest.content, manifest.attempt) == (1, "training", 1)
    state = manifest.state.model_dump()
    for field, value in golden.STATE.model_dump().items():
        assert state[field] == value
    assert manifest.lineage[0].loaded == "weights"
    assert {name: info.shape for name, info in manifest.tensors.items()} == golden.SHAPES


@pytest.mark.parametrize("kind", OPTIMIZERS["adamw"].state_kinds)
@pytest.mark.parametrize("name", golden.SHAPES)
def test_version_1_holds_the_values_that_were_saved(name: str, kind: Kind) -> None:
    candidate = find(VERSION_1)
    assert torch.equal(read_tensor(candidate.folder, candidate.manifest, name, kind), golden.values(name, kind))


def test_version_1_verifies_and_has_its_fingerprint() -> None:
    folder = find(VERSION_1).folder
    assert check_files(folder, lambda num_bytes: None).problems == ()
    assert find(VERSION_1).manifest.fingerprint == FINGERPRINT


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in VERSION_1.rglob("*") if path.is_file()) < 20_000


FINGERPRINT = {"master": "f23f8a7ad2152998", "exp_avg": "f2df4629d6f9ce2e", "exp_avg_sq": "93b828e4c1e3ad0c"}
