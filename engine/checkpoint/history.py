"""Keeps a run's faults and recent losses, so that a resumed run behaves the same.

    skipped, num_rollbacks    in every checkpoint, and in checkpoints/skipped.json, which is written before a rollback
    recent losses             in every checkpoint, as input for the next limits
    recent gradient norms     likewise, with `resilience.skip_above_deviations`

A step beyond one of these limits is a fault. The factors are fields of `resilience`:

    divergence         loss_spike x median of the last 64 losses
    loss, grad_norm    mean + skip_above_deviations x standard deviation, both over the last skip_window numbers

The second rule follows OLMo-core (optim/skip_step_optimizer.py) with three differences. A number below the mean is never an
outlier. The mean includes neither skipped steps nor the previous step.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triaxis.engine.config.schema.run import ResilienceConfig
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.errors import CheckpointError
from triaxis.engine.step_limits import StepLimits
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.state_files import read_object

SKIPPED = "skipped.json"
"""Name of the file with skipped ranges and rollbacks, in a run's checkpoint folder."""

MEDIAN_OVER = 64
"""Number of losses in the median."""
MEDIAN_FROM = 8
"""Minimum number of losses for a limit: a run's first steps predict nothing."""


@dataclass(slots=True)
class RunHistory:
    """One run's faults and recent numbers, identical on every rank.

    Attributes:
        skipped: ranges of skipped sample ids.
        num_rollbacks: number of rollbacks over all attempts.
        losses: (step from 0, loss) for the last steps, ascending.
        grad_norms: (step from 0, gradient norm) for the same steps; empty if no limit depends on gradient norms.
    """

    skipped: SkippedRanges = field(default_factory=SkippedRanges)
    num_rollbacks: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    grad_norms: list[tuple[int, float]] = field(default_factory=list)

    def remember(self, step: int, loss: float, grad_norm: float, config: ResilienceConfig) -> None:
        """Append the numbers of step `step` (from 0), which updated the weights.

        Only as many are kept as the limits in `config` need.
        """
        deviations = config.skip_above_deviations
        kept = max(
            MEDIAN_OVER if config.loss_spike is not None else 0, config.skip_window if deviations is not None else 0
        )
        if kept:
            self.losses = [*self.losses[-kept:], (step, loss)]
        if deviations is not None:
            self.grad_norms = [*self.grad_norms[-config.skip_window :], (step, grad_norm)]

    def limits(self, step: int, config: ResilienceConfig) -> StepLimits:
        """Compute the limits for a step.

        A limit is infinite if its rule is off or too few earlier steps are known. The outlier limits `loss` and
        `grad_norm` are infinite too if all known losses, or gradient norms, are equal.
        """
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
        """Replace the losses and gradient norms by those in another history."""
        self.losses, self.grad_norms = list(other.losses), list(other.grad_norms)

    def write(self, folder: Path) -> None:
        """Write skipped ranges and rollbacks to the checkpoint folder, atomically (rank 0).

        Raises:
            OSError: the folder cannot be written.
        """
        record = {"skipped": self.skipped.ranges, "num_rollbacks": self.num_rollbacks}
        write_atomically(folder / SKIPPED, [(json.dumps(record) + "\n").encode()])


def _before(step: int, numbers: Sequence[tuple[int, float]], most: int) -> list[float]:
    """Return the last numbers, at most `most`, from steps up to `step` - 2."""
    return [number for at, number in numbers if at <= step - 2][-most:]


def _above(known: Sequence[float], deviations: float, window: int) -> float:
    """Return the limit above which a number is an outlier.

    The limit is infinite with fewer than `window // 2` numbers, or if all are equal.
    """
    if len(known) < window // 2:
        return math.inf
    deviation = statistics.stdev(known)
    return statistics.fmean(known) + deviations * deviation if deviation else math.inf


def read_history(folder: Path, saved: Sequence[tuple[int, int]] = (), num_rollbacks: int = 0) -> RunHistory:
    """Merge a checkpoint's skipped ranges and rollback count with those in `folder`/skipped.json, if it exists.

    The result has the ranges of both, and the larger count.

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
            "Restore it, or write the ranges that the files in events/ record: "
            '{"skipped": [[first, stop], ...], "num_rollbacks": 1}'
        ) from None
