"""Checkpoints of runs with SGD and with a rule of an extension: they resume to the bit, change their layout, and no other
optimizer goes on from them."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.runs import run
from tests.harness import RankFailedError, run_ranks
from tests.parity.cases import Case
from triaxis.engine.checkpoint.directory import find

pytestmark = pytest.mark.distributed

SGD = Case("gpt", dp=2, num_layers=2, global_batch_size=4, optimizer="sgd")
SAVING = {"interval": 2}


@pytest.mark.parametrize(
    ("case", "moments"),
    [(SGD, {"momentum_buffer"}), (replace(SGD, optimizer="extension"), {"mean", "square"})],
    ids=["sgd", "extension"],
)
def test_a_run_resumes_to_the_bit_and_in_another_layout(case: Case, moments: set[str], tmp_path: Path) -> None:
    straight = run_ranks(run, 2, case, str(tmp_path / "straight"), 4, 0, {}, (2, 4))[0]
    before = run_ranks(run, 2, case, str(tmp_path / "cut"), 2, 0, SAVING, (2,))[0]
    manifest = find(tmp_path / "cut").manifest
    assert set(before.fingerprints[2]) == {"master", *moments} == set(manifest.kinds)
    assert before.fingerprints[2] == manifest.fingerprint
    other = replace(case, dp=1, tp=2)
    load = {"load": str(tmp_path / "cut"), "interval": 100}
    elsewhere = run_ranks(run, 2, other, str(tmp_path / "elsewhere"), 4, 0, load, (2,))[0]
    after = run_ranks(run, 2, case, str(tmp_path / "cut"), 4, 1, SAVING, (2, 4))[0]
    assert (after.began, [*before.losses, *after.losses]) == (2, straight.losses)
    assert after.fingerprints == straight.fingerprints
    assert elsewhere.fingerprints[2] == straight.fingerprints[2]
    assert elsewhere.losses == pytest.approx(straight.losses[2:], rel=1e-9)


def test_another_optimizer_takes_the_weights_alone(tmp_path: Path) -> None:
    one = replace(SGD, dp=1)
    run_ranks(run, 1, one, str(tmp_path / "sgd"), 2, 0, SAVING)
    adamw = replace(one, optimizer="adamw")
    load = {"load": str(tmp_path / "sgd"), "interval": 100, "accept": ["optimizer"]}
    with pytest.raises(
        RankFailedError, match=r"(?s)optimizer.name: sgd there, adamw here.*checkpoint.load_what=weights"
    ):
        run_ranks(run, 1, adamw, str(tmp_path / "adamw"), 4, 0, load)
    (trace,) = run_ranks(run, 1, adamw, str(tmp_path / "adamw"), 2, 0, load | {"load_what": "weights"})
    assert trace.began == 0 and len(trace.losses) == 2
