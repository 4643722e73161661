"""Runs a run's validations, and ends them early when the ranks agree to stop.

    batch k        post the batch's forwards, then a sum of all ranks' stop flags
    batch k + 1    post the batch's forwards, then read the sum that was posted after batch k

The sum is read one batch late, so the pipeline does not drain between batches. A signal during batch k ends every rank's validation
after batch k + 1.

An incomplete validation reports no loss. Its step's checkpoint records that the validation is still due. The next attempt runs this
validation before its first step, with the same weights and batches.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Protocol

from triaxis.engine.comm.stop import StopRequest
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.step import Engine


class StepSource(Protocol):
    """A source of this rank's microbatches, step by step.

    `next_labels` counts the upcoming step's labels, for the next token and then for each token further ahead.
    """

    consumed_samples: int

    def next_labels(self) -> list[float]: ...
    def next_step(self) -> list[Any]: ...
    def close(self) -> None: ...


class ValidationObserver(Protocol):
    """Receiver of each validation's loss (nats per token), or of its end without a loss. Steps count from 0."""

    def on_validation(self, step: int, loss: float) -> None: ...
    def on_validation_left_out(self, step: int) -> None: ...
    def enter(self, part: StepPart) -> None: ...


class Validation:
    """Validations of one run, on every rank.

    Args:
        engine: engine whose weights are validated.
        open_batches: function () -> the validation batches from their start; None if the run has no validation.
        observer: receiver of the loss, or of the report that there is no loss.
        stop: this rank's stop requests.
    """

    def __init__(
        self,
        engine: Engine,
        open_batches: Callable[[], StepSource] | None,
        observer: ValidationObserver,
        stop: StopRequest,
    ) -> None:
        self._engine = engine
        self._open_batches = open_batches
        self._observer = observer
        self._stop = stop
        self._num_batches = engine.config.eval.steps
        self._num_made = 0

    def is_due(self, step: int) -> bool:
        """Whether a validation follows step `step`, from 0.

        One follows every `eval.interval` steps, and the last step of a phase of the run (`engine/config/schema/phases.py`).
        """
        interval, end_step = self._engine.config.eval.interval, self._engine.plan.phase.end_step
        if self._open_batches is None or interval is None:
            return False
        return (step + 1) % interval == 0 or step + 1 == end_step

    def make(self, step: int) -> bool:
        """Validate after step `step`, counted from 0. Every rank calls it, if `is_due` is true.

        Returns:
            True if the validation has its loss; False if the ranks agreed to stop first. Equal on every rank.
        """
        assert self._open_batches is not None, "a validation without batches"
        self._num_made = 0
        if self._stop.agreed is None:
            self._observer.enter(StepPart.VALIDATION)
            with closing(self._open_batches()) as source:
                loss = self._engine.evaluate(self._batches(source))
            if self._num_made == self._num_batches:
                self._observer.on_validation(step, loss)
                return True
        self._observer.on_validation_left_out(step)
        return False

    def _batches(self, source: StepSource) -> Iterator[list[Any]]:
        """Yield the validation batches until the ranks agree to stop. A batch's forwards are posted before the next is taken."""
        sums: Callable[[], list[float]] | None = None
        for _ in range(self._num_batches):
            yield source.next_step()
            self._num_made += 1
            if sums is not None:
                self._stop.decide(sums())
                if self._stop.agreed is not None:
                    return
            sums = self._engine.post_stop(self._stop.flags())
        if sums is not None:
            self._stop.decide(sums())
