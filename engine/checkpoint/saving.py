"""Saves checkpoints during training, in phases on which all ranks agree.

    phase       every rank                                              ends when
    IDLE        -                                                       a save is due: all ranks copy their state
    WRITING     its thread writes rank_<n>.safetensors                  the flags show that all have written, or one has failed
    COMMITTING  rank 0's thread writes the manifest and renames         the flag shows that rank 0 has

Only the flags in the step's small all-reduce change the phase, so all ranks are in the same phase. No rank waits for another rank's
disk, and no thread communicates. Flags are read one step late, so each flag names its phase.

At most one save runs at a time. A failed save is reported with rank and reason, and its files are removed. Older checkpoints stay,
and training continues to the next interval. Only a run's last save must succeed.
"""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.environment import describe_environment
from triaxis.engine.checkpoint.format.fingerprint import to_text
from triaxis.engine.checkpoint.format.manifest import (
    FORMAT_VERSION,
    Ancestor,
    DataFile,
    Kind,
    LossScaleRecord,
    Manifest,
    TensorInfo,
    TrainingState,
    write_manifest,
)
from triaxis.engine.checkpoint.format.store import fingerprints
from triaxis.engine.checkpoint.history import RunHistory
from triaxis.engine.checkpoint.shards import fingerprint
from triaxis.engine.checkpoint.writer import RankWriter
from triaxis.engine.comm.agreement import SaveFlags
from triaxis.engine.comm.texts import gather_text
from triaxis.engine.config.quantities.update_settings import is_frozen
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import CheckpointError, SaveError, counted
from triaxis.engine.layout.shard_spec import ParamSpec
from triaxis.engine.step import Engine
from triaxis.engine.storage.state_files import reason


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run's checkpoints record besides the engine's state.

    Attributes:
        run: name of the run directory.
        attempt: attempt number, from 0.
        data: the samples' fingerprint (key `samples`, or `samples of PHASE`), the tokenizer's identity, and the end-of-document id.
        lineage: the run's ancestors, oldest first.
        wandb_id: function () -> the wandb run's id, once known.
        specs: all parameters of the model (a rank's engine holds only its own).
        history: the run's faults so far, updated during the run.
    """

    run: str
    attempt: int
    data: dict[str, Any]
    lineage: tuple[Ancestor, ...]
    wandb_id: Callable[[], str | None]
    specs: Sequence[ParamSpec]
    history: RunHistory = field(default_factory=RunHistory)


class SaveNotices(Protocol):
    """Receiver of save events, called on every rank. Only rank 0 gets `on_retired` and the true `num_bytes` (others get 0).

    `stall_seconds` is the time in which this rank copied its state. Before that it waited `waited_seconds` for the previous save.
    `seconds` goes from the copy's start until this rank learns of the commit. `on_retired` gets the removed checkpoints' names.
    """

    def on_save_started(self, step: int, stall_seconds: float, waited_seconds: float) -> None: ...
    def on_saved(self, step: int, folder: Path, num_bytes: int, seconds: float) -> None: ...
    def on_save_failed(self, step: int, reason: str) -> None: ...
    def on_retired(self, names: list[str]) -> None: ...
    def on_fingerprint(self, step: int, fingerprint: dict[Kind, str]) -> None: ...


class _Phase(Enum):
    IDLE = "idle"
    WRITING = "writing"
    COMMITTING = "committing"


@dataclass(frozen=True, slots=True)
class _Committed:
    num_bytes: int
    retired: list[str]


class CheckpointSaver:
    """Saver of a run's checkpoints. Every rank has one, and all save together.

    Args:
        engine: source of the saved state.
        directory: target folder; only rank 0 changes it.
        facts: run name, data fingerprint and more, which each checkpoint records.
        notices: receiver of save events, such as a failure.
    """

    def __init__(self, engine: Engine, directory: CheckpointDirectory, facts: RunFacts, notices: SaveNotices) -> None:
        self._engine = engine
        self._config = engine.config.checkpoint
        self._directory = directory
        self._facts = facts
        self._notices = notices
        self._world = engine.topology.axis("world")
        self._layout = describe_environment(engine)
        self._phase = _Phase.IDLE
        self._saving: TrainingState | None = None
        self._started_seconds = 0.0
        self._writing: Future[None] | None = None
        self._committing: Future[_Committed] | None = None
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-commit")
        self._failure: str | None = None
        self._writer = (
            RankWriter(engine.optimizer, engine.topology.rank, self._config.in_background, _say_retry)
            if self._config.saves
            else None
        )

    def flags(self) -> SaveFlags:
        """Report whether this rank's part in the running save is done or has failed. Never blocks.

        The step's all-reduce sums these flags over all ranks, for `agreed`.
        """
        future = self._pending()
        if future is None or not future.done():
            return SaveFlags()
        is_done = future.exception() is None
        if self._phase is _Phase.WRITING:
            return SaveFlags(written=1.0) if is_done else SaveFlags(not_written=1.0)
        return SaveFlags(committed=1.0) if is_done else SaveFlags(not_committed=1.0)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether `after_step` will save or fingerprint after `step` steps.

        If it will, the caller must first pass each step's summed `flags()`, this step's included, to `agreed`.
        """
        return self._fingerprint_is_due(step) or self._save_is_due(step, is_last)

    def after_step(
        self, step: int, consumed_samples: int, lr: float, *, is_last: bool, validation_is_due: bool = False
    ) -> None:
        """Compute the fingerprint and start the save that are due after step number `step` (from 1).

        A save first waits until the previous one has ended. Without `checkpoint.async` it also waits for its own end.

        Args:
            step: number of steps so far, including this one.
            consumed_samples: number of training samples consumed so far.
            lr: learning rate in this step.
            is_last: whether the run ends after this step, which is then saved whatever the interval.
            validation_is_due: whether the run stops before the validation that follows this step.
        """
        if self._fingerprint_is_due(step):
            values = fingerprint(self._engine)
            self._notices.on_fingerprint(step, {kind: to_text(value) for kind, value in values.items()})
        if self._save_is_due(step, is_last):
            self._save(step, consumed_samples, lr, validation_is_due)

    def _fingerprint_is_due(self, step: int) -> bool:
        every = self._config.fingerprint_interval
        return every is not None and step % every == 0

    def _save_is_due(self, step: int, is_last: bool) -> bool:
        every = self._config.every
        return self._config.saves and (is_last or (every is not None and step % every == 0))

    def finish(self) -> None:
        """Wait for a running save at the end of the run.

        Raises:
            SaveError: the last save failed, so the run's last steps would be lost; raised on every rank.
        """
        self.settle()
        if self._failure is not None:
            raise SaveError(
                f"the last checkpoint could not be written: {self._failure}. The last steps exist in memory only and "
                "are lost when this process ends; older checkpoints are untouched. Make room or restore access, and give the same "
                "command again: it goes on from the newest complete checkpoint."
            )

    def close(self) -> None:
        """Stop the threads. A running write completes but is not committed; a running commit completes."""
        if self._writer is not None:
            self._writer.close()
        self._committer.shutdown(wait=True)

    def _save(self, step: int, consumed_samples: int, lr: float, validation_is_due: bool) -> None:
        assert self._writer is not None, "a save of a run that saves nothing"
        started = time.monotonic()
        self.settle()
        waited_seconds = time.monotonic() - started
        plan, scale = self._engine.plan, self._engine.loss_scale.state()
        self._saving = TrainingState(
            step=step,
            consumed_samples=consumed_samples,
            consumed_tokens=plan.phase.tokens_before(step),
            num_updates=self._engine.optimizer.num_updates,
            lr=lr,
            rng={
                "seed": self._engine.config.train.seed,
                "kind": "masks, order and initial weights are functions of the seed",
            },
            loss_scale=None if scale is None else LossScaleRecord(**scale._asdict()),
            data=self._facts.data,
            wandb_id=self._facts.wandb_id(),
            skipped=self._facts.history.skipped.ranges,
            num_rollbacks=self._facts.history.num_rollbacks,
            recent_losses=tuple(self._facts.history.losses),
            recent_grad_norms=tuple(self._facts.history.grad_norms),
            validation_is_due=validation_is_due,
        )
        self._failure = None
        self._started_seconds = time.monotonic()
        self._writing = self._writer.save(self._partial(self._saving))
        self._phase = _Phase.WRITING
        self._notices.on_save_started(step, time.monotonic() - self._started_seconds, waited_seconds)
        if not self._config.in_background:
            self.settle()

    def _pending(self) -> "Future[None] | Future[_Committed] | None":
        if self._phase is _Phase.WRITING:
            return self._writing
        return self._committing if self._phase is _Phase.COMMITTING else None

    def agreed(self, flags: SaveFlags) -> None:
        """Advance the running save as all ranks' flags allow. Call this once per step, in order.

        Once all ranks have written, rank 0 commits. Commit or failure ends the save.

        Args:
            flags: sums of `flags()` over all ranks, from one step.
        """
        if self._phase is _Phase.WRITING and flags.written + flags.not_written == self._world.size:
            if flags.not_written:
                self._fail()
                return
            self._phase = _Phase.COMMITTING
            if self._world.index == 0:
                assert self._saving is not None and self._writing is not None
                self._committing = self._committer.submit(self._commit, self._saving)
        elif self._phase is _Phase.COMMITTING and flags.not_committed:
            self._fail()
        elif self._phase is _Phase.COMMITTING and flags.committed:
            self._saved()

    def settle(self) -> None:
        """Wait until a running save is on the disk or has failed. Every rank calls this after the same step."""
        while self._phase is not _Phase.IDLE:
            future = self._pending()
            if future is not None:
                future.exception()
            self.agreed(SaveFlags(*self._world.sum_values(self.flags(), self._engine.topology.device, "checkpoint")))

    def _saved(self) -> None:
        assert self._saving is not None
        committed = self._committing.result() if self._committing is not None else _Committed(0, [])
        step, seconds = self._saving.step, time.monotonic() - self._started_seconds
        self._reset()
        self._notices.on_saved(step, self._directory.step_folder(step), committed.num_bytes, seconds)
        if committed.retired:
            self._notices.on_retired(committed.retired)

    def _fail(self) -> None:
        """Gather all ranks' failure reasons, remove the written files, report the failure, and go back to IDLE."""
        assert self._saving is not None
        future = self._pending()
        error = future.exception() if future is not None else None
        reasons = gather_text(
            self._world, "" if error is None else _text(error), self._engine.topology.device, "checkpoint"
        )
        told = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
        self._failure = "; ".join(told[:3]) + (f"; and {counted(len(told) - 3, 'more rank')}" if len(told) > 3 else "")
        if self._world.index == 0:
            shutil.rmtree(self._partial(self._saving), ignore_errors=True)
        step = self._saving.step
        self._reset()
        self._notices.on_save_failed(step, self._failure)

    def _reset(self) -> None:
        self._phase, self._saving, self._writing, self._committing = _Phase.IDLE, None, None, None

    def _partial(self, state: TrainingState) -> Path:
        return self._directory.partial(state.step, self._facts.attempt)

    def _commit(self, state: TrainingState) -> _Committed:
        """Turn all ranks' files into a checkpoint, in rank 0's thread.

        Older checkpoints that `keep_last` and `keep_every` do not keep are then removed.

        Raises:
            CheckpointError: rank 0 does not see every rank's file.
            OSError: the folder cannot be written.
        """
        partial = self._partial(state)
        parts = [partial / f"rank_{rank:05d}.json" for rank in range(self._world.size)]
        missing = [part.stem for part in parts if not part.exists()]
        if missing:
            raise CheckpointError(
                f"rank 0 cannot see the files of {counted(len(missing), 'rank')} ({', '.join(missing[:3])}): "
                f"{self._directory.path} must be on storage that all nodes share. Set checkpoint.dir to such a folder"
            )
        files = [DataFile.model_validate_json(part.read_bytes()) for part in parts]
        files = [file for file in files if file.pieces]
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            content="training",
            run=self._facts.run,
            attempt=self._facts.attempt,
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            state=state,
            fingerprint=fingerprints(piece for file in files for piece in file.pieces),
            layout=self._layout,
            config=_recorded(self._engine.config),
            lineage=self._facts.lineage,
            tensors={
                spec.name: TensorInfo(
                    shape=spec.shape,
                    is_trained=spec.is_trained and not is_frozen(spec.name, self._engine.config.optimizer),
                )
                for spec in self._facts.specs
            },
            files=tuple(files),
        )
        write_manifest(partial, manifest)
        for part in parts:
            part.unlink()
        named = {file.name for file in files}
        for file in partial.glob("*.safetensors"):
            if file.name not in named:
                file.unlink()
        self._directory.commit(partial, state.step)
        retired = self._directory.retire(state.step, self._config.keep_last, self._config.keep_every)
        return _Committed(manifest.num_bytes, retired)


def _recorded(config: Config) -> dict[str, Any]:
    """Return the configuration as JSON, without `phases` if the run has none."""
    return config.model_dump(mode="json", exclude=set() if config.phases else {"phases"})


def _text(error: BaseException) -> str:
    if isinstance(error, OSError):
        return reason(error)
    return f"{error}" if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _say_retry(error: OSError) -> None:
    print(f"checkpoint: write failed, retrying: {_text(error)}", file=sys.stderr)
