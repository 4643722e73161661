"""Going back to a checkpoint by itself: the loop around the training loop.

    .. | step 40, saved | 41 | 42 | 43 is not finite     ->     step 40 again | 41 | 42 | 43 on the next samples | ..

Weights, moments and the place in the data are those of the newest checkpoint from before the step; the step's samples are left out
from now on (`engine/data/skipped.py`). So the run is from here on the one that was told from its start to leave them out. That is
written beside the checkpoints before anything is loaded, and in every later checkpoint.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Protocol

from engine.checkpoint.directory import CheckpointDirectory
from engine.checkpoint.format.manifest import TrainingState
from engine.checkpoint.history import RunHistory
from engine.checkpoint.resume import go_back
from engine.checkpoint.saving import Checkpoints
from engine.comm.stop import Stop, StopRequest
from engine.errors import CheckpointError, DivergenceError
from engine.resilience.guard import GoBack, Guard, Notices
from engine.step import Engine
from engine.train import Observer, StepSource, train


class RollbackObserver(Observer, Protocol):
    """An observer that can forget steps whose numbers nobody will tell it."""

    def on_rollback(self, step: int) -> None: ...


class Rollback:
    """How one run goes back.

    Args:
        engine: to load into.
        directory: of the run's checkpoints.
        data: fingerprints of the data, as checkpoints record them.
        history: of the run; changed here.
        notices: who is told.
    """

    def __init__(
        self,
        engine: Engine,
        directory: CheckpointDirectory,
        data: dict[str, str],
        history: RunHistory,
        notices: Notices,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._data = data
        self._history = history
        self._notices = notices

    def __call__(self, wanted: GoBack, samples: tuple[int, int]) -> TrainingState:
        """Load the newest checkpoint from before the step, and leave `samples` out; every rank calls it.

        Raises:
            DivergenceError: the run has gone back as often as it may.
            CheckpointError: there is no such checkpoint, or nothing can be written down.
        """
        history, most = self._history, self._engine.config.resilience.max_rollbacks
        if history.num_rollbacks >= most:
            raise DivergenceError(
                f"{wanted.why} The run has gone back {history.num_rollbacks} times already (resilience.max_rollbacks = "
                f"{most}): leaving samples out does not help."
            )
        history.skipped = history.skipped.with_([samples])
        history.num_rollbacks += 1
        self._write_down(self._directory.path)
        beginning = go_back(self._engine, self._directory, wanted.step, self._data)
        history.losses = beginning.history.losses
        self._engine.diverged.zero_()
        state, first, stop = beginning.state, *samples
        self._notices.on_trouble(
            "rolled_back",
            wanted.step,
            f"back to step {state.step:,} ({beginning.source}); samples {first:,} to {stop - 1:,} are left out from now on "
            f"({history.num_rollbacks} of {most} times)",
            to_step=state.step,
            samples=list(samples),
            skipped=[list(pair) for pair in history.skipped.ranges],
            num_rollbacks=history.num_rollbacks,
        )
        return state

    def _write_down(self, folder: Path) -> None:
        world = self._engine.topology.axis("world")
        reason = ""
        if world.index == 0:
            try:
                self._history.write(folder)
            except OSError as error:
                reason = f"{folder}: {error.strerror or error}"
        reason = world.announce(reason, self._engine.topology.device, "rollback")
        if reason:
            raise CheckpointError(
                f"which samples are left out cannot be written down: {reason}. A later attempt would train on them. Make room or "
                "restore access, and give the same command again."
            )


def train_through(
    engine: Engine,
    consumed_samples: int,
    open_batches: Callable[[int], StepSource],
    open_validation: Callable[[], StepSource] | None,
    observer: RollbackObserver,
    checkpoints: Checkpoints,
    stop: StopRequest,
    guard: Guard,
    rollback: Rollback,
    *,
    validation_is_due: bool = False,
) -> tuple[Stop | None, int]:
    """`engine.train.train`, from `consumed_samples` on, as often as the run goes back.

    Args:
        open_batches: opens the training batches at a number of consumed samples, without those that the run leaves out by then.
        validation_is_due: the validation after the last step that was made has no loss yet.

    Returns:
        Why it stopped (None after the last step), and the samples that are consumed.
    """
    while True:
        with closing(open_batches(consumed_samples)) as batches:
            try:
                stopped = train(
                    engine,
                    batches,
                    open_validation,
                    observer,
                    checkpoints,
                    stop,
                    guard,
                    validation_is_due=validation_is_due,
                )
                return stopped, batches.consumed_samples
            except GoBack as wanted:
                samples = guard.samples(wanted.step)
                checkpoints.settle()
                state = rollback(wanted, samples)
                consumed_samples, validation_is_due = state.consumed_samples, state.validation_is_due
                observer.on_rollback(state.step)
