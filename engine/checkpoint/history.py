"""The faults that a run remembers: part of every checkpoint, so that a resumed run continues alike (no torch here).

    skipped, num_rollbacks    also in checkpoints/skipped.json, written before a rollback: a kill before the next save loses none
    recent losses             of the last steps that were made, for the limit of the next ones

The limit of step s is a multiple of the median loss up to step s - 2, which every rank knows when step s is posted, however early
the host reads (`engine/train.py`). So it does not depend on saves, validations or resumes.
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
"""A file in the folder of a run's checkpoints."""

MEDIAN_OVER = 64
"""Number of losses in the median."""
MEDIAN_FROM = 8
"""Least number of losses for a limit: the first steps of a run predict nothing."""


@dataclass(slots=True)
class RunHistory:
    """The history of one run, the same on every rank.

    Attributes:
        skipped: sample ids that are left out.
        num_rollbacks: rollbacks over all attempts.
        losses: (step from 0, loss) of the last steps, ascending.
    """

    skipped: SkippedRanges = field(default_factory=SkippedRanges)
    num_rollbacks: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)

    def remember(self, step: int, loss: float) -> None:
        """Append the loss of step `step` (from 0)."""
        self.losses = [*self.losses[-MEDIAN_OVER:], (step, loss)]

    def loss_limit(self, step: int, factor: float | None) -> float:
        """Return the largest allowed loss of a step; infinite without a factor or with too few losses."""
        known = [loss for at, loss in self.losses if at <= step - 2][-MEDIAN_OVER:]
        if factor is None or len(known) < MEDIAN_FROM:
            return math.inf
        return factor * statistics.median(known)

    def write(self, folder: Path) -> None:
        """Write skipped ranges and rollbacks into the folder of checkpoints, atomically (rank 0).

        Raises:
            OSError: the folder cannot be written.
        """
        record = {"skipped": self.skipped.ranges, "num_rollbacks": self.num_rollbacks}
        write_atomically(folder / SKIPPED, [(json.dumps(record) + "\n").encode()])


def read_history(folder: Path, saved: Sequence[tuple[int, int]] = (), num_rollbacks: int = 0) -> RunHistory:
    """Return the history of a checkpoint (`saved`, `num_rollbacks`) merged with what was written to its folder since.

    Raises:
        CheckpointError: the file is damaged, so skipped samples would be trained on.
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
