"""Decides after each step whether to continue, skip its update, roll back or stop.

    fp16 gradients overflow                                               continues with a lower loss scale
    a loss or gradient norm far above those of the last steps             continues without that update (`StepLimits`)
    no label in the global batch is counted                               continues without that update
    a loss or gradient that is not finite, a loss above its limit, or
    tokens without room in their experts' buffers                         does what resilience.on_nonfinite says
        stop        no update from that step on; the error names the first rank and module
        skip        no update in that step; its samples stay consumed
        rollback    returns to a checkpoint (`engine/resilience/rollback.py`)
    more outliers and skips in a row than resilience.max_skips_in_a_row   stops
    replicated weights that differ                                        always stops

All ranks read the same numbers for the same step at the same point in the loop, so they decide alike.
"""

import math
from collections.abc import Callable
from contextlib import closing
from typing import Any, Protocol

from triaxis.engine.checkpoint.history import RunHistory
from triaxis.engine.errors import DivergenceError, ReplicaError
from triaxis.engine.resilience.nonfinite import FirstNonFinite, locate
from triaxis.engine.resilience.replicas import ReplicaCheck
from triaxis.engine.run.validation import StepSource
from triaxis.engine.step import Engine
from triaxis.engine.step_limits import StepLimits
from triaxis.engine.step_result import StepResult, explain
from triaxis.engine.steps_in_flight import RollbackRequested
from triaxis.engine.telemetry.record.events import EventKind


class GuardNotices(Protocol):
    """Receiver of a guard's events, called on every rank with the same arguments. `step` counts from 0."""

    def on_trouble(self, kind: EventKind, step: int, message: str, **details: Any) -> None: ...


class Guard:
    """Judges one run's steps by their numbers, and raises an error if the run must stop or roll back.

    Every rank has one and calls it alike.

    Args:
        engine: engine that runs the steps.
        history: the run's recent losses, skipped samples and rollbacks (`triaxis.engine.checkpoint.history`).
        open_batches: function (number of consumed samples) -> this rank's batches from that point on, to repeat a step.
        notices: receiver of the events.
    """

    def __init__(
        self, engine: Engine, history: RunHistory, open_batches: Callable[[int], StepSource], notices: GuardNotices
    ) -> None:
        self._engine = engine
        self._config = engine.config.resilience
        self._history = history
        self._open_batches = open_batches
        self._notices = notices
        self._replicas = ReplicaCheck(engine)
        self._num_skips_in_a_row = 0
        self._last_alike: int | None = None

    def limits(self, step: int) -> StepLimits:
        """Return the limits for loss and gradient norm in step `step`, from 0, derived from recent steps."""
        return self._history.limits(step, self._config)

    def before_update(self, step: int) -> None:
        """Start a replica check if one is due. Gradients are complete, and weights are still the ones that produced them."""
        every = self._config.replica_check_interval
        if every is not None and (step + 1) % every == 0:
            self._replicas.post(step)

    def judge(self, step: int, result: StepResult) -> None:
        """Judge a step by its numbers, and report any trouble.

        The caller passes the steps in order. The history gets the numbers of a step that updated the weights. A diverged
        step whose loss or gradient norm is not finite is repeated, to find the first non-finite value.

        Raises:
            DivergenceError: the run cannot continue.
            RollbackRequested: the run must continue from a checkpoint.
            ReplicaError: replicated weights differ.
        """
        self._check_replicas(step)
        if result.skip == "overflowed":
            return
        if result.skip == "no_labels":
            self._report_empty(step)
            return
        if not result.skip:
            self._num_skips_in_a_row = 0
            self._history.remember(step, result.loss, result.grad_norm, self._config)
            return
        first, stop = self.samples(step)
        if result.skip == "outlier":
            self._leave_out(step, result, (first, stop))
            return
        is_finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
        finding = None if is_finite else self._locate(step)
        where = f"step {step + 1:,} on samples {first:,} to {stop - 1:,}"
        seen = "" if finding is None else f" {finding}."
        message, error = f"{where}: {result.why}.{seen}", f"{where}: {explain(result)}{seen}"
        kind: EventKind = "loss_spike" if finding is None else "non_finite"
        if result.dropped:
            kind = "experts_overflow"
        details = _details(result, (first, stop), finding)
        policy = self._config.on_nonfinite
        self._num_skips_in_a_row += 1
        if policy == "skip" and self._num_skips_in_a_row <= self._config.max_skips_in_a_row:
            self._notices.on_trouble(kind, step, f"{message} Its update is skipped.", policy=policy, **details)
            return
        self._notices.on_trouble(kind, step, message, policy=policy, **details)
        if policy == "rollback":
            raise RollbackRequested(step, (first, stop), error)
        if policy == "skip":
            raise DivergenceError(
                f"{error} {self._config.max_skips_in_a_row} updates in a row were skipped "
                "(resilience.max_skips_in_a_row): the weights themselves are damaged. Continue from an older checkpoint."
            )
        raise DivergenceError(error)

    def _report_empty(self, step: int) -> None:
        first, stop = self.samples(step)
        self._notices.on_trouble(
            "no_labels",
            step,
            f"step {step + 1:,} on samples {first:,} to {stop - 1:,}: none of their labels counts, so there is no loss "
            "(data.count_document_starts=false leaves out the first token of each document). Its update is skipped.",
            samples=[first, stop],
        )

    def _leave_out(self, step: int, result: StepResult, samples: tuple[int, int]) -> None:
        """Report an outlier step, whose update was skipped.

        Raises:
            DivergenceError: too many updates in a row were skipped.
        """
        first, stop = samples
        message = f"step {step + 1:,} on samples {first:,} to {stop - 1:,}: {result.why}."
        self._num_skips_in_a_row += 1
        self._notices.on_trouble(
            "outlier", step, f"{message} Its update is skipped.", **_details(result, samples, finding=None)
        )
        if self._num_skips_in_a_row > (most := self._config.max_skips_in_a_row):
            raise DivergenceError(
                f"{message} {most} updates in a row were skipped before (resilience.max_skips_in_a_row), so this is no longer an "
                "outlier. The mean is over updates that were made, and will not follow. Continue from an older checkpoint, or with "
                "a larger resilience.skip_above_deviations."
            )

    def samples(self, step: int) -> tuple[int, int]:
        """Range [first, stop) that contains a step's sample ids; skipped ids may lie inside."""
        plan = self._engine.plan
        return self._history.skipped.span(plan.phase.samples_before(step), plan.samples_per_step)

    def _locate(self, step: int) -> FirstNonFinite:
        with closing(self._open_batches(self._engine.plan.phase.samples_before(step))) as source:
            return locate(self._engine, source.next_step())

    def _check_replicas(self, step: int) -> None:
        found = self._replicas.read(step)
        if found is None:
            return
        if not found:
            self._last_alike = step + 1
            return
        before = "no comparison came before it"
        if self._last_alike is not None:
            before = f"in step {self._last_alike:,} they were the same"
        message = f"step {step + 1:,}: " + "; ".join(found)
        self._notices.on_trouble("replicas_differ", step, f"{message}.", differences=found)
        raise ReplicaError(
            f"{message}. These weights must be bitwise equal; {before}. Memory, a link or a kernel of a named rank has failed, and "
            "its gradients have reached the weights of all ranks. Remove its node, and continue from an earlier checkpoint (write "
            "its name into checkpoints/latest)."
        )


def _details(result: StepResult, samples: tuple[int, int], finding: FirstNonFinite | None) -> dict[str, Any]:
    details: dict[str, Any] = {"loss": result.loss, "grad_norm": result.grad_norm, "samples": list(samples)}
    if finding is not None:
        details |= {"first_rank": finding.rank, "first": finding.what, "first_samples": list(finding.sample_ids)}
    return details
