"""The faults that a run remembers: part of every checkpoint, so that a resumed run continues alike.

    skipped, num_rollbacks    also in checkpoints/skipped.json, written before a rollback: a kill before the next save loses none
    recent losses             of the last steps that were made, for the limits of the next ones; with
                              `resilience.skip_above_deviations` their gradient norms too

The limits of step s follow from the losses and norms up to step s - 2, which every rank knows when step s is posted, however early
the host reads (`engine/train.py`). So they do not depend on saves, validations or resumes.

    divergence         loss_spike x median of 64 losses
    loss, grad_norm    mean + skip_above_deviations x standard deviation of the last skip_window numbers

The second rule is that of OLMo-core (optim/skip_step_optimizer.py), but for three things: a number below the mean is never
an outlier, the numbers of steps that were left out do not enter the mean, and the step before is not in it.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triaxis.engine.config.run import ResilienceConfig
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.errors import CheckpointError
from triaxis.engine.step_limits import StepLimits
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.state_files import read_object

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
        grad_norms: the same of gradient norms; empty where no limit depends on them.
    """

    skipped: SkippedRanges = field(default_factory=SkippedRanges)
    num_rollbacks: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    grad_norms: list[tuple[int, float]] = field(default_factory=list)

    def remember(self, step: int, loss: float, grad_norm: float, config: ResilienceConfig) -> None:
        """Append the numbers of step `step` (from 0), whose update was made, as far as the limits of `config` need them."""
        deviations = config.skip_above_deviations
        kept = max(
            MEDIAN_OVER if config.loss_spike is not None else 0, config.skip_window if deviations is not None else 0
        )
        if kept:
            self.losses = [*self.losses[-kept:], (step, loss)]
        if deviations is not None:
            self.grad_norms = [*self.grad_norms[-config.skip_window :], (step, grad_norm)]

    def limits(self, step: int, config: ResilienceConfig) -> StepLimits:
        """Return the largest numbers of a step; infinite without their rule or with too few steps."""
        divergence = math.inf
        known = _before(step, self.losses, MEDIAN_OVER)
        if config.loss_spike is not None and len(known) >= MEDIAN_FROM:
            divergence = config.loss_spike * statistics.median(known)
        deviations, window = config.skip_above_deviations, config.skip_window
        if deviations is None:
            return StepLimits(divergence)
        return StepLimits(
            divergence,
            *(_above(_before(step, each, window), deviations, window) for each in (self.losses, self.grad_norms)),
        )

    def continue_from(self, other: "RunHistory") -> None:
        """Take over the numbers of the steps that another history remembers."""
        self.losses, self.grad_norms = list(other.losses), list(other.grad_norms)

    def write(self, folder: Path) -> None:
        """Write skipped ranges and rollbacks into the folder of checkpoints, atomically (rank 0).

        Raises:
            OSError: the folder cannot be written.
        """
        record = {"skipped": self.skipped.ranges, "num_rollbacks": self.num_rollbacks}
        write_atomically(folder / SKIPPED, [(json.dumps(record) + "\n").encode()])


def _before(step: int, numbers: Sequence[tuple[int, float]], most: int) -> list[float]:
    """Return the last numbers, at most `most`, that every rank knows when a step is posted."""
    return [number for at, number in numbers if at <= step - 2][-most:]


def _above(known: Sequence[float], deviations: float, window: int) -> float:
    """Return the largest number that is no outlier; infinite with fewer than half of `window`, or where all are equal."""
    if len(known) < window // 2:
        return math.inf
    deviation = statistics.stdev(known)
    return statistics.fmean(known) + deviations * deviation if deviation else math.inf


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
