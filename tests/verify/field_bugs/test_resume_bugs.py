"""The checks of a resume name bugs of the field: samples that are read again, moments that are not restored."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.runs import Trace, run
from tests.harness import RankFailedError, run_ranks
from tests.parity.cases import Case
from tests.planting import Plant, run_planted
from triaxis.engine.config.values.optimizer_kinds import StateKind
from triaxis.engine.data.loader import Batches
from triaxis.engine.optimizer.distributed import DistributedOptimizer

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

CASE = Case("gpt", dp=2, num_layers=2, global_batch_size=4)
NUM_BEFORE, NUM_STEPS = 2, 4
SAVING = {"interval": NUM_BEFORE}
MOMENTS: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")


def data_begins_anew_on_resume() -> None:
    """Plant batches that forget how many samples were consumed."""
    made = Batches.__init__

    def anew(self: Batches, *args: Any, consumed_samples: int, **options: Any) -> None:
        made(self, *args, consumed_samples=0, **options)

    Batches.__init__ = anew  # type: ignore[method-assign]


def moments_are_not_restored() -> None:
    """Plant an optimizer whose moments are zero after a checkpoint is read."""
    restored = DistributedOptimizer.restored

    def masters_alone(self: DistributedOptimizer, num_updates: int) -> None:
        for owned in self.owned:
            for kind in MOMENTS:
                owned.state.write({kind: torch.zeros_like(owned.state.read(kind))})
        restored(self, num_updates)

    DistributedOptimizer.restored = masters_alone  # type: ignore[method-assign]


def trained(rank: int, folder: str, attempt: int, until: int) -> Trace:
    return run(rank, CASE, folder, until, attempt, SAVING, (NUM_BEFORE, NUM_STEPS))


@pytest.mark.parametrize(
    "plant", [None, data_begins_anew_on_resume], ids=lambda plant: getattr(plant, "__name__", None)
)
def test_samples_that_are_read_again_are_named(plant: Plant | None, tmp_path: Path) -> None:
    cut = str(tmp_path / "cut")
    straight = run_ranks(trained, 2, str(tmp_path / "straight"), 0, NUM_STEPS)
    before = run_ranks(trained, 2, cut, 0, NUM_BEFORE)
    after = run_planted(plant, trained, 2, cut, 1, NUM_STEPS)
    for whole, first, second in zip(straight, before, after, strict=True):
        assert second.fingerprints[NUM_BEFORE] == first.fingerprints[NUM_BEFORE]
        is_right = [*first.sample_ids, *second.sample_ids] == whole.sample_ids
        is_equal = second.fingerprints[NUM_STEPS] == whole.fingerprints[NUM_STEPS]
        assert is_right == is_equal == (plant is None)


def test_a_resume_with_other_moments_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(trained, 2, str(tmp_path), 0, NUM_BEFORE)
    with pytest.raises(RankFailedError, match="fingerprint of exp_avg, exp_avg_sq is not the one that was saved"):
        run_planted(moments_are_not_restored, trained, 2, str(tmp_path), 1, NUM_STEPS)
