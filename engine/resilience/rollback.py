"""Returns a run to a checkpoint from before a bad step.

    .. | step 40, saved | 41 | 42 | 43 is not finite     ->     load step 40 | 41 | 42 | 43 on the next samples | ..

Weights, moments and the position in the data come from the newest checkpoint before the step. The step's samples are skipped from
now on (`engine/data/skipped.py`). So the run equals one that was configured from the start to skip these samples. The skipped
samples are recorded next to the checkpoints before anything is loaded, and in every later checkpoint.
"""

from pathlib import Path

from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.format.manifest import TrainingState
from triaxis.engine.checkpoint.history import RunHistory
from triaxis.engine.checkpoint.resume import go_back
from triaxis.engine.comm.texts import announce
from triaxis.engine.errors import CheckpointError, DivergenceError, counted
from triaxis.engine.resilience.guard import GuardNotices
from triaxis.engine.step import Engine
from triaxis.engine.steps_in_flight import RollbackRequested


class Rollback:
    """The rollback of one run; a call performs it.

    Args:
        engine: engine that receives the loaded state.
        directory: the run's checkpoints.
        data: data fingerprints, as checkpoints record them.
        history: the run's history of skipped samples and losses; a call changes it.
        notices: receiver of the event.
    """

    def __init__(
        self,
        engine: Engine,
        directory: CheckpointDirectory,
        data: dict[str, str],
        history: RunHistory,
        notices: GuardNotices,
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._data = data
        self._history = history
        self._notices = notices

    def __call__(self, request: RollbackRequested) -> TrainingState:
        """Load the newest checkpoint before the requested step, and skip that step's samples.

        Every rank calls this method. The skipped samples and the number of rollbacks are written to disk first.

        Returns:
            The loaded state, after whose step the run continues.

        Raises:
            DivergenceError: the run has already used up its rollbacks (`resilience.max_rollbacks`).
            CheckpointError: there is no such checkpoint, or the skipped samples cannot be recorded.
        """
        history, most = self._history, self._engine.config.resilience.max_rollbacks
        if history.num_rollbacks >= most:
            raise DivergenceError(
                f"{request.why} The run has already gone back {counted(history.num_rollbacks, 'time')} (resilience.max_rollbacks "
                f"= {most}): leaving out samples does not help."
            )
        history.skipped = history.skipped.with_([request.samples])
        history.num_rollbacks += 1
        self._write_down(self._directory.path)
        beginning = go_back(self._engine, self._directory, request.step, self._data)
        history.continue_from(beginning.history)
        self._engine.diverged.zero_()
        state, (first, stop) = beginning.state, request.samples
        self._notices.on_trouble(
            "rolled_back",
            request.step,
            f"back to step {state.step:,} ({beginning.source}); samples {first:,} to {stop - 1:,} are left out from now on "
            f"({history.num_rollbacks} of {most} times)",
            to_step=state.step,
            samples=list(request.samples),
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
        reason = announce(world, reason, self._engine.topology.device, "rollback")
        if reason:
            raise CheckpointError(
                f"the samples to leave out cannot be recorded: {reason}. A later attempt would train on them. Make room or restore "
                "access, and give the same command again."
            )
