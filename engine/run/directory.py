"""Lays out and manages the run directory, which holds everything that a run writes.

    runs/<name>/                  name from runtime.name or the config's stem; under SLURM <stem>-<jobid>
        config.yaml               resolved configuration with every default, from the last attempt that began
        extension/0123456789abcdef/   sources of `model.extension`, named by 16 digits of their digest
        metrics.jsonl             one object per step, appended over all attempts
        events/node_00000.jsonl   starts, ends, validations and faults, in one file per node
        logs/attempt_00/rank_00003.log
        logs/attempt_00/banner.json                              the attempt's banner
        profile/attempt_00/rank_00003.steps_10_to_12.json.gz     a rank's trace, with telemetry.profile
        timeline.json                                            all ranks' rows, with telemetry.timeline
        timeline/attempt_00/rank_00003.json                      one rank's row
        memory/attempt_00/rank_00003.pickle                      allocator snapshot of a rank that ran out of GPU memory
        hangs/attempt_00/report.json                             after a hang, which rank waits for which
        wandb/  wandb_id          one wandb run over all attempts
        wandb_alerted             number of bytes of each file in events/ for which alerts were sent
        tensorboard/
        checkpoints/              unless checkpoint.dir is set
        saved                     JSON, written after the first checkpoint; later attempts then resume
        finished                  JSON, written after the last step
        starting_over             exists while a start from scratch was requested and has not begun yet
        lock                      held by rank 0 while the run lives

Rank 0 calls `RunDirectory.create` and sends the attempt's number to the other ranks, which call `RunDirectory.join`. Rank 0 calls
`RunDirectory.begin` once its engine is built and its checkpoint loaded. An attempt that fails before leaves only its log.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.directory import CHECKPOINTS, CONFIG, CheckpointDirectory
from triaxis.engine.checkpoint.lock import FolderLock
from triaxis.engine.checkpoint.resume_rules import lengthening
from triaxis.engine.config.rules.run import name_problems
from triaxis.engine.config.schema.telemetry import ProfileConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import to_yaml
from triaxis.engine.errors import TriaxisError
from triaxis.engine.run import entries as run_entries
from triaxis.engine.run.entries import FINISHED, LOGS, METRICS, SAVED, STARTING_OVER, next_name
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.state_files import explaining_storage, read_regular, try_to_write
from triaxis.engine.storage.user_module import keep


def run_name(config: Config, stem: str, variables: Mapping[str, str]) -> str:
    """Return the run's name: `runtime.name`, or else the config's stem (with the job id under SLURM).

    Args:
        config: resolved configuration.
        stem: stem of the config's path ("gpt_tiny").
        variables: environment variables; SLURM_JOB_ID is read (a requeued job keeps its id).
    """
    if config.runtime.name is not None:
        return config.runtime.name
    job = variables.get("SLURM_JOB_ID")
    return f"{stem}-{job}" if job else stem


class RunDirectory:
    """The paths of one run, and this attempt's number.

    Attributes:
        path: the directory.
        attempt: this attempt's number, from 0; the last attempt's number if the run is finished.
        finished: results that `finish` wrote; None while the run is not finished.
        from_scratch: whether this attempt begins at step 0 even if checkpoints exist; set on rank 0 alone.
        swept: names of half-written checkpoints that `begin` removed.
        set_aside: folder to which `begin` moved the checkpoints for a start from scratch; None if it moved none.
        num_losses: number of times that rank 0 found the directory or the checkpoint folder removed or moved.
    """

    def __init__(self, path: Path, attempt: int, finished: Mapping[str, Any] | None) -> None:
        self.path = path
        self.attempt = attempt
        self.finished = finished
        self.from_scratch = False
        self.swept: Sequence[str] = ()
        self.set_aside: Path | None = None
        self.num_losses = 0
        self._locks: list[FolderLock] = []
        self._config: Config | None = None
        self._saved: bytes | None = None

    @classmethod
    def create(cls, config: Config, runs_dir: str | Path, name: str, *, from_scratch: bool = False) -> "RunDirectory":
        """Open the directory for a new attempt, on rank 0.

        If the run is finished and the configuration plans no more steps, the directory stays as it is. `finished` then holds the
        results, and no attempt starts. With `from_scratch`, an attempt always starts. Until `begin`, only lock files, `logs/` and
        the marker file `starting_over` change.

        Args:
            config: this attempt's configuration; `engine/checkpoint/resume_rules.py` has the rules for changes between attempts.
            runs_dir: parent of run directories.
            name: name of this run.
            from_scratch: whether to begin at step 0 even if checkpoints exist; `begin` moves these aside and removes none.

        Raises:
            StorageError: the directory or the checkpoint folder cannot be written.
            TriaxisError: the name is not a folder name; the directory is a link, or an entry links to a place outside; an entry is
                damaged or foreign; the directory holds steps of a run with another configuration; checkpoint.dir is in another
                run's directory; or a live run has locked one of the two folders.
        """
        path = _path_of(runs_dir, name)
        run = cls(path, 0, None)
        run._check_checkpoints(config)
        with _explaining_runs(runs_dir, name):
            path.mkdir(parents=True, exist_ok=True)
        try:
            with _explaining_runs(runs_dir, name):
                run_entries.check_links(path)
                advice = f"start this one under another name: RUN_NAME={next_name(path)}"
                run._locks.append(FolderLock(path, advice))
                run.finished = run._check(config, from_scratch=from_scratch)
            if run.finished is not None:
                run.close()
                run.attempt = run_entries.last_attempt(path)
                return run
            run._lock_checkpoints(config)
            with _explaining_runs(runs_dir, name):
                run.attempt = run_entries.next_attempt(path)
                run.from_scratch = from_scratch
                if from_scratch:
                    (path / STARTING_OVER).touch()
                run.rank_log(0).parent.mkdir(parents=True)
        except BaseException:
            run.close()
            raise
        return run

    def begin(self, config: Config) -> None:
        """Make this attempt the directory's current one. Rank 0 calls it once the engine is built and its state loaded.

        It writes config.yaml and the extension's sources, and removes `finished` and `starting_over`. A start from scratch also
        moves earlier checkpoints aside and removes `saved`. Half-written checkpoints of dead attempts are removed.

        Raises:
            UserModuleError: the extension's sources cannot be read, or have changed since they were loaded.
            StorageError: the directory or the checkpoint folder cannot be written.
        """
        checkpoints = self.checkpoints(config)
        with _explaining_checkpoints(checkpoints.path):
            self.swept = checkpoints.sweep()
            if self.from_scratch:
                self.set_aside = checkpoints.set_aside()
        with _explaining_runs(self.path.parent, self.path.name):
            if self.from_scratch:
                (self.path / SAVED).unlink(missing_ok=True)
            (self.path / FINISHED).unlink(missing_ok=True)
            self._write_config(config)
            (self.path / STARTING_OVER).unlink(missing_ok=True)
        self._config = config

    def put_back(self) -> None:
        """Recreate and lock the run directory and the checkpoint folder if they were removed or moved.

        Rank 0 calls it, after `begin`. The run directory gets its log folder, config.yaml and the extension's sources again. It
        gets the file `saved` again only if the checkpoint folder lies outside it and is still in place. Other content stays lost.

        Raises:
            TriaxisError: another live run has locked one of the folders meanwhile.
            OSError: a folder or lock cannot be created.
        """
        missing = [lock for lock in self._locks if not lock.is_in_place()]
        self.num_losses += bool(missing)
        for lock in missing:
            lock.take_again()
        if any(lock.folder == self.path for lock in missing):
            assert self._config is not None, "the attempt has begun"
            self.rank_log(0).parent.mkdir(parents=True, exist_ok=True)
            self._write_config(self._config)
            if self._saved is not None and len(missing) < len(self._locks):
                write_atomically(self.path / SAVED, [self._saved])

    @classmethod
    def look(
        cls, config: Config, runs_dir: str | Path, name: str, *, from_scratch: bool = False
    ) -> "RunDirectory | None":
        """Return a finished run's directory, with `attempt` 0. None if the run is not finished, or if `from_scratch`.

        No lock or file is left. Before None is returned, trial files are written in the run, log and (if the run
        saves) checkpoint folders.

        Raises:
            TriaxisError: a folder cannot be written, or `create` would fail. Live runs are allowed.
        """
        run = cls(_path_of(runs_dir, name), 0, None)
        run._check_checkpoints(config)
        with _explaining_runs(runs_dir, name):
            run.finished = run._check(config, from_scratch=from_scratch)
            if run.finished is not None:
                return run
            for folder in (run.path, run.path / LOGS):
                try_to_write(folder)
        if config.checkpoint.saves:
            folder = run.checkpoints(config).path
            with _explaining_checkpoints(folder):
                try_to_write(folder)
        return None

    def _check(self, config: Config, *, from_scratch: bool) -> Mapping[str, Any] | None:
        """Refuse a directory in which this attempt cannot run. Return the results if the run is finished, else None.

        It reads `saved` for `put_back`, before anything is changed: a file that is too large is refused.

        Raises:
            TriaxisError: see `create`.
            OSError: the directory cannot be read.
        """
        if not self.path.exists():
            return None
        run_entries.check_links(self.path)
        run_entries.check_kinds(self.path)
        if from_scratch:
            return None
        if self.has_saved:
            self._saved = read_regular(self.path / SAVED)
        if run_entries.has_results(self.path):
            run_entries.check_same_config(self.path, config)
        return run_entries.read_finished(self.path, config)

    def _check_checkpoints(self, config: Config) -> None:
        """Refuse the run directory itself, or a folder in another run's directory, as checkpoint folder.

        A folder whose `latest`, `skipped.json` or lock is no regular file is refused too.

        Raises:
            TriaxisError: the folder is refused.
        """
        folder = self.checkpoints(config).path
        with _explaining_checkpoints(folder):
            if config.checkpoint.dir is not None:
                run_entries.check_checkpoint_folder(folder, self.path)
            run_entries.check_kinds_of_checkpoints(folder)

    def _lock_checkpoints(self, config: Config) -> None:
        """Lock the checkpoint folder against other runs. A missing folder is created if this run saves, else ignored."""
        folder = self.checkpoints(config).path
        with _explaining_checkpoints(folder):
            if config.checkpoint.saves:
                folder.mkdir(parents=True, exist_ok=True)
            if folder.exists():
                self._locks.append(FolderLock(folder, "set checkpoint.dir to another folder"))

    def _write_config(self, config: Config) -> None:
        if (extension := config.model.extension) is not None:
            keep(self.path, extension.source, extension.digest)
        write_atomically(self.path / CONFIG, [to_yaml(config, describe=True).encode()])

    @property
    def is_starting_over(self) -> bool:
        """Whether a start from scratch was requested and has not begun yet.

        Raises:
            StorageError: the directory cannot be read.
        """
        with _explaining_runs(self.path.parent, self.path.name):
            return (self.path / STARTING_OVER).exists()

    def starts_over(self, *, from_scratch: bool, is_first_start: bool) -> bool:
        """Whether an attempt begins at step 0 even if checkpoints exist.

        Args:
            from_scratch: whether the user asked for a start from scratch.
            is_first_start: whether this is the command's first start; a restarted command resumes from its checkpoints.

        Raises:
            StorageError: the directory cannot be read.
        """
        return from_scratch and (is_first_start or self.is_starting_over)

    @classmethod
    def join(cls, runs_dir: str | Path, name: str, attempt: int) -> "RunDirectory":
        """Return the directory object for a rank other than 0. Its node need not share the first node's files."""
        return cls(_path_of(runs_dir, name), attempt, None)

    def checkpoints(self, config: Config) -> CheckpointDirectory:
        """Return the checkpoint folder: `checkpoint.dir` if set, else `checkpoints/` in this directory."""
        return CheckpointDirectory(Path(config.checkpoint.dir or self.path / CHECKPOINTS))

    def profile(self, rank: int, profile: ProfileConfig) -> Path:
        """Return the path of a rank's trace in this attempt."""
        steps = f"steps_{profile.start}_to_{profile.start + profile.steps - 1}"
        return self.path / "profile" / f"attempt_{self.attempt:02d}" / f"rank_{rank:05d}.{steps}.json.gz"

    def timeline_row(self, rank: int) -> Path:
        """Return the path of the JSON file with a rank's row in this attempt's timeline."""
        return self.path / "timeline" / f"attempt_{self.attempt:02d}" / f"rank_{rank:05d}.json"

    def memory_snapshot(self, rank: int) -> Path:
        """Return the path for a rank's allocator snapshot, written if it runs out of GPU memory in this attempt."""
        return self.path / "memory" / f"attempt_{self.attempt:02d}" / f"rank_{rank:05d}.pickle"

    def hang(self) -> Path:
        """Return the folder for this attempt's hang reports."""
        return self.path / "hangs" / f"attempt_{self.attempt:02d}"

    def rank_log(self, rank: int) -> Path:
        return self.path / LOGS / f"attempt_{self.attempt:02d}" / f"rank_{rank:05d}.log"

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def events(self, node: int) -> Path:
        """Return the path of a node's event file, to which all attempts append."""
        return run_entries.events_file(self.path, node)

    @property
    def wandb_id(self) -> Path:
        return self.path / run_entries.WANDB_ID

    @property
    def wandb_alerted(self) -> Path:
        return self.path / run_entries.WANDB_ALERTED

    def known_wandb_id(self) -> str | None:
        """Return the id of the run's wandb page; None if there is none."""
        return run_entries.known_wandb_id(self.wandb_id)

    @property
    def has_saved(self) -> bool:
        """Whether the run directory has the file `saved`.

        It shows that a checkpoint was completed since the last start from scratch.
        """
        return (self.path / SAVED).exists()

    def mark_saved(self, folder: Path, step: int) -> None:
        """Write `saved` if it is missing, so that later attempts resume.

        `put_back` is called first, in case the directory was removed. `saved` records the checkpoint's folder and step.

        Raises:
            TriaxisError: the directory was removed, and another live run has taken its place.
            OSError: the directory cannot be written.
        """
        self.put_back()
        if not self.has_saved:
            record = {"first_checkpoint": str(folder), "step": step}
            self._saved = (json.dumps(record, indent=2) + "\n").encode()
            write_atomically(self.path / SAVED, [self._saved])

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def finish(self, **results: Any) -> None:
        """Mark the run as finished, and write `results` (steps, loss, val_loss, ...) as JSON, atomically.

        `put_back` is called first, in case the directory was removed.

        Raises:
            TriaxisError: the directory was removed, and another live run has taken its place.
            StorageError: the directory cannot be written.
        """
        with _explaining_runs(self.path.parent, self.path.name):
            self.put_back()
            write_atomically(self.path / FINISHED, [(json.dumps(results, indent=2) + "\n").encode()])
        self.finished = results

    def finished_message(self, config: Config) -> str:
        """Format the message for a user who starts this finished run again.

        Args:
            config: the new start's configuration.
        """
        assert self.finished is not None, "only a finished run has this message"
        results = ", ".join(f"{key} {_short(value)}" for key, value in self.finished.items() if value is not None)
        longer = "nothing was saved, so it cannot go on"
        if self.has_saved:
            words = lengthening(config, self.finished.get("steps", 1))
            longer = f"the same command with {words} (in place of its own) goes on from the newest checkpoint"
        return (
            f"The run {self.path.name} is finished ({results}); nothing was started.\n"
            f"  results      {self.path}/ (metrics.jsonl, events/, logs/)\n"
            f"  another one  RUN_NAME={next_name(self.path)} and the same command\n"
            f"  longer       {longer}\n"
            f"  from zero    the same command with --from-scratch"
        )

    def next_start(self, config: Config) -> str:
        """Describe, in a clause, what the same command will do at its next start."""
        try:
            newest = max(self.checkpoints(config).steps(), default=0)
        except OSError as error:
            return f"the same command goes on from the newest checkpoint (which cannot be looked up: {error})"
        if not newest:
            return "no checkpoint is complete, so the same command begins as this attempt's run did"
        return f"the same command goes on from step {newest:,}"

    def close(self) -> None:
        """Release the locks. The kernel releases them if this process dies."""
        for lock in self._locks:
            lock.close()
        self._locks.clear()


def _path_of(runs_dir: str | Path, name: str) -> Path:
    """Return the run directory's path.

    Raises:
        TriaxisError: the name is not a single folder in `runs_dir`, or the folder is a link.
        StorageError: the folder cannot be reached.
    """
    for problem in name_problems(name):
        raise TriaxisError(str(problem))
    path = Path(runs_dir) / name
    with _explaining_runs(runs_dir, name):
        is_link = path.is_symlink()
    if is_link:
        raise TriaxisError(
            f"{path} is a link to {path.readlink()}, so the run would write outside of {runs_dir}. Set runtime.runs_dir to where "
            f"run directories belong, or move the folder here."
        )
    return path


@contextmanager
def _explaining_runs(runs_dir: str | Path, name: str) -> Iterator[None]:
    advice = "Set runtime.runs_dir to a folder that this user can write, or start under another name: RUN_NAME=..."
    with explaining_storage(Path(runs_dir) / name, "what this run writes", advice):
        yield


@contextmanager
def _explaining_checkpoints(folder: Path) -> Iterator[None]:
    with explaining_storage(folder, "checkpoints", "Set checkpoint.dir to a folder that this user can write."):
        yield


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
