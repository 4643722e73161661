"""What a run remembers of what went wrong: saved in every checkpoint, so that a resumed run goes on the same way (no torch here).

    skipped, num_rollbacks    also in checkpoints/skipped.json, written before the run goes back: a kill before the next save loses
                              neither
    recent losses             of the last steps that were made, for the limit of the next ones

The limit of step s is a multiple of the median of the losses up to step s - 2: what every rank knows when step s is posted, however
early the host reads (`engine/train.py`), so it does not depend on when a run saves, validates or was resumed.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.data.skipped import SkippedRanges
from engine.errors import CheckpointError
from engine.storage.files import write_atomically
from engine.storage.state_files import read_object

SKIPPED = "skipped.json"
"""In the folder of a run's checkpoints."""

MEDIAN_OVER = 64
"""Losses that the median is of."""
MEDIAN_FROM = 8
"""With fewer there is no limit: the first steps of a run tell nothing of the next."""


@dataclass(slots=True)
class RunHistory:
    """Of one run, the same on every rank.

    Attributes:
        skipped: sample ids that are left out.
        num_rollbacks: over all attempts.
        losses: (step from 0, loss) of the last steps that were made, ascending.
    """

    skipped: SkippedRanges = field(default_factory=SkippedRanges)
    num_rollbacks: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)

    def remember(self, step: int, loss: float) -> None:
        """Step `step` (from 0) was made."""
        self.losses = [*self.losses[-MEDIAN_OVER:], (step, loss)]

    def loss_limit(self, step: int, factor: float | None) -> float:
        """What the loss of a step may be at most; infinite without a factor or with too few losses."""
        known = [loss for at, loss in self.losses if at <= step - 2][-MEDIAN_OVER:]
        if factor is None or len(known) < MEDIAN_FROM:
            return math.inf
        return factor * statistics.median(known)

    def write(self, folder: Path) -> None:
        """Remember skipped ranges and rollbacks beside the checkpoints; complete or not there (rank 0).

        Raises:
            OSError: the folder cannot be written.
        """
        record = {"skipped": self.skipped.ranges, "num_rollbacks": self.num_rollbacks}
        write_atomically(folder / SKIPPED, [(json.dumps(record) + "\n").encode()])


def read_history(folder: Path, saved: Sequence[tuple[int, int]] = (), num_rollbacks: int = 0) -> RunHistory:
    """What a checkpoint says (`saved`, `num_rollbacks`) together with what was written beside it since then.

    Raises:
        CheckpointError: the file is damaged: samples that were left out would be trained on.
    """
    path = folder / SKIPPED
    try:
        record = read_object(path)
        if record is None:
            return RunHistory(SkippedRanges.of(saved), num_rollbacks)
        ranges = [(int(start), int(stop)) for start, stop in record["skipped"]]
        return RunHistory(SkippedRanges.of([*saved, *ranges]), max(num_rollbacks, int(record["num_rollbacks"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): it names the samples that this run leaves out, and without it they would be trained on. "
            'Restore it, or write what the files in events/ say of them: {"skipped": [[first, stop], ...], "num_rollbacks": 1}'
        ) from None
