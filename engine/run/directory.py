"""The run directory: everything that a run leaves behind, in one place (no torch here).

    runs/<name>/                  name: runtime.name, or the config's stem; <stem>-<jobid> under SLURM, kept over requeues
        config.yaml               resolved: what was asked for, with every default, by the last attempt that began
        metrics.jsonl             one object per step, appended over all attempts
        events/node_00000.jsonl   starts, ends, validations, trouble; a file per node (`engine.telemetry.record.events`)
        logs/attempt_00/rank_00003.log
        profile/attempt_00/rank_00003.steps_10_to_12.json.gz     where telemetry.profile asks for it
        timeline.json  timeline/attempt_00/rank_00003.json       where telemetry.timeline does: of all ranks, and the row of one
        memory/attempt_00/rank_00003.pickle                      of a rank that ran out of GPU memory
        hangs/attempt_00/report.json                             of a run that hung: who waits for whom
        wandb/  wandb_id          one wandb run over all attempts
        wandb_alerted             up to which bytes of the files in events/ people have been alerted
        tensorboard/
        checkpoints/              unless checkpoint.dir says otherwise (`engine/checkpoint/directory.py`)
        saved                     JSON; there once a checkpoint was saved: this run never starts from random weights again
        finished                  JSON; there once the last step is made
        starting_over             there while a start from scratch was asked for and has not begun yet
        lock                      held by rank 0 while the run lives

Rank 0 calls `RunDirectory.create`; the caller tells the others its attempt, and they call `RunDirectory.join`. Once its engine is
built and its checkpoint loaded, rank 0 calls `RunDirectory.begin`: an attempt that fails before leaves its log and nothing else.
Which entries are accepted is in `engine/run/entries.py`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.checkpoint.directory import CheckpointDirectory
from engine.checkpoint.lock import FolderLock
from engine.config.load import to_yaml
from engine.config.run import name_problems
from engine.config.telemetry import ProfileConfig
from engine.config.tree import Config
from engine.errors import TriaxisError
from engine.run import entries as run_entries
from engine.run.entries import CHECKPOINTS, CONFIG, FINISHED, LOGS, METRICS, SAVED, STARTING_OVER, next_name
from engine.storage.files import write_atomically
from engine.storage.state_files import explaining_storage, try_to_write


def run_name(config: Config, stem: str, variables: Mapping[str, str]) -> str:
    """The name of a run: `runtime.name`, else the config file's stem, under SLURM with the job's id.

    A requeued job keeps its id, so it finds the directory of its earlier attempts.

    Args:
        config: the resolved configuration.
        stem: of the config's path ("gpt_tiny").
        variables: SLURM_JOB_ID is read; an array's task has its own id there.
    """
    if config.runtime.name is not None:
        return config.runtime.name
    job = variables.get("SLURM_JOB_ID")
    return f"{stem}-{job}" if job else stem


class RunDirectory:
    """Paths of one run, and which attempt this is.

    Attributes:
        path: the directory.
        attempt: number of earlier attempts; of a finished run, its last attempt.
        finished: what `finish` wrote; None while the run is not done.
        from_scratch: whether this attempt begins at step 0 whatever is there; on rank 0.
        swept: what attempts that died left half-written among the checkpoints, and was removed.
        set_aside: where the checkpoints were moved for a start from scratch.
        num_losses: how often the directory or the checkpoints were found removed or moved, on rank 0.
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
        """Open the directory for a new attempt, on the one rank that decides (rank 0).

        A finished run is left untouched, unless the configuration now asks for more steps: `finished` tells what it came
        to, and there is nothing to start. Of other runs nothing is changed but the locks and `logs/`, until `begin`.

        Args:
            config: of this attempt. What may differ from earlier attempts' is said in `engine/checkpoint/resume_rules.py`.
            runs_dir: parent of run directories.
            name: of this one.
            from_scratch: begin at step 0 again whatever is there; `begin` moves checkpoints aside and removes none.

        Raises:
            StorageError: the directory or the folder of checkpoints cannot be written.
            TriaxisError: the name is no folder name; it, or something in it, is a link to somewhere else; an entry is damaged or
                of another kind than a run makes; the directory holds steps of a run with another configuration (attempts that
                never made a step have nothing to protect); checkpoint.dir lies in another run's directory; or a run that is alive
                writes in one of the two folders.
        """
        path = _path_of(runs_dir, name)
        run = cls(path, 0, None)
        run._check_checkpoints(config)
        with _explaining_runs(runs_dir, name):
            path.mkdir(parents=True, exist_ok=True)
        try:
            with _explaining_runs(runs_dir, name):
                run_entries.check_links(path)
                run._locks.append(_lock_of_run(path))
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
        """Make this attempt that of the directory, on rank 0: the engine is built, and what it begins with is loaded.

        Earlier checkpoints are moved aside for a start from scratch, and what dead attempts left half-written is removed.

        Raises:
            StorageError: the directory or the folder of checkpoints cannot be written.
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
            self._saved = (self.path / SAVED).read_bytes() if self.has_saved else None
        self._config = config

    def put_back(self) -> None:
        """Make the directory and the locks again that were removed or moved under this run; on rank 0, after `begin`.

        `num_losses` counts how often any was missing. What was in a removed directory stays lost. `saved` is written again where
        the checkpoints are in another folder and still there: the next attempt must not start from random weights without them.

        Raises:
            TriaxisError: another run is alive in one of the folders by now.
            OSError: they cannot be made.
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
        """The directory if it holds a finished run of this configuration, else None; nothing is changed.

        Raises:
            TriaxisError: as `create`, but for another run that is alive.
        """
        run = cls(_path_of(runs_dir, name), 0, None)
        run._check_checkpoints(config)
        with _explaining_runs(runs_dir, name):
            run.finished = run._check(config, from_scratch=from_scratch)
            if run.finished is not None:
                return run
            for folder in (run.path, run.path / LOGS):
                try_to_write(folder)
        if config.checkpoint.interval is not None:
            folder = run.checkpoints(config).path
            with _explaining_checkpoints(folder):
                try_to_write(folder)
        return None

    def _check(self, config: Config, *, from_scratch: bool) -> Mapping[str, Any] | None:
        """Refuse a directory in which this attempt cannot run; returns what a finished run came to.

        Raises:
            TriaxisError: as `create`.
            OSError: the directory cannot be read.
        """
        if not self.path.exists():
            return None
        run_entries.check_links(self.path)
        run_entries.check_kinds(self.path)
        if from_scratch:
            return None
        if run_entries.has_results(self.path):
            run_entries.check_same_config(self.path, config)
        return run_entries.read_finished(self.path, config)

    def _check_checkpoints(self, config: Config) -> None:
        """Refuse a folder of checkpoints in another run's directory, or one that holds what no run makes.

        Raises:
            TriaxisError: as `create`.
        """
        folder = self.checkpoints(config).path
        with _explaining_checkpoints(folder):
            if config.checkpoint.dir is not None:
                run_entries.check_checkpoint_folder(folder, self.path)
            run_entries.check_kinds_of_checkpoints(folder)

    def _lock_checkpoints(self, config: Config) -> None:
        """Lock the folder of checkpoints against other runs, wherever it is: they may name it by `checkpoint.dir`."""
        folder = self.checkpoints(config).path
        with _explaining_checkpoints(folder):
            if config.checkpoint.interval is not None:
                folder.mkdir(parents=True, exist_ok=True)
            if folder.exists():
                self._locks.append(_lock_of_checkpoints(folder))

    def _write_config(self, config: Config) -> None:
        write_atomically(self.path / CONFIG, [to_yaml(config, describe=True).encode()])

    @property
    def is_starting_over(self) -> bool:
        """Return True if a start from scratch was asked for and has not begun.

        Raises:
            StorageError: the directory cannot be read.
        """
        with _explaining_runs(self.path.parent, self.path.name):
            return (self.path / STARTING_OVER).exists()

    @classmethod
    def join(cls, runs_dir: str | Path, name: str, attempt: int) -> "RunDirectory":
        """The directory as every other rank sees it, whether or not its node shares the first node's files."""
        return cls(_path_of(runs_dir, name), attempt, None)

    def checkpoints(self, config: Config) -> CheckpointDirectory:
        """The folder of this run's checkpoints."""
        return CheckpointDirectory(Path(config.checkpoint.dir or self.path / CHECKPOINTS))

    def profile(self, rank: int, profile: ProfileConfig) -> Path:
        """Where the trace of a rank goes in this attempt."""
        steps = f"steps_{profile.start}_to_{profile.start + profile.steps - 1}"
        return self.path / "profile" / f"attempt_{self.attempt:02d}" / f"rank_{rank:05d}.{steps}.json.gz"

    def timeline_row(self, rank: int) -> Path:
        """Where a rank writes its row of the timeline in this attempt."""
        return self.path / "timeline" / f"attempt_{self.attempt:02d}" / f"rank_{rank:05d}.json"

    def memory_snapshot(self, rank: int) -> Path:
        """Where a rank that runs out of GPU memory writes down what its allocator held."""
        return self.path / "memory" / f"attempt_{self.attempt:02d}" / f"rank_{rank:05d}.pickle"

    def hang(self) -> Path:
        """Where ranks of this attempt write what they do when the run hangs (`engine/resilience/hang/watch.py`)."""
        return self.path / "hangs" / f"attempt_{self.attempt:02d}"

    def rank_log(self, rank: int) -> Path:
        return self.path / LOGS / f"attempt_{self.attempt:02d}" / f"rank_{rank:05d}.log"

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def events(self, node: int) -> Path:
        """The file in which the ranks of a node of the layout write down events."""
        return run_entries.events_file(self.path, node)

    @property
    def wandb_id(self) -> Path:
        return self.path / run_entries.WANDB_ID

    @property
    def wandb_alerted(self) -> Path:
        return self.path / run_entries.WANDB_ALERTED

    def known_wandb_id(self) -> str | None:
        """The id of the run's page; None where it has none."""
        return run_entries.known_wandb_id(self.wandb_id)

    @property
    def has_saved(self) -> bool:
        """Whether an attempt of this run has completed a checkpoint."""
        return (self.path / SAVED).exists()

    def mark_saved(self, folder: Path, step: int) -> None:
        """Remember the first checkpoint: from now on the run resumes, and never starts from random weights unasked.

        Raises:
            TriaxisError: the directory was removed, and another run is alive in its place.
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
        """Mark the run as done: `results` (steps, loss, val_loss, ...) as JSON, complete or not there.

        Raises:
            TriaxisError: the directory was removed, and another run is alive in its place.
            StorageError: the directory cannot be written.
        """
        with _explaining_runs(self.path.parent, self.path.name):
            self.put_back()
            write_atomically(self.path / FINISHED, [(json.dumps(results, indent=2) + "\n").encode()])
        self.finished = results

    def finished_message(self) -> str:
        """What a second start of a finished run says: that it is done, where its results are, how to start another."""
        assert self.finished is not None, "only a finished run has this message"
        results = ", ".join(f"{key} {_short(value)}" for key, value in self.finished.items() if value is not None)
        return (
            f"The run {self.path.name} is finished ({results}); nothing was started.\n"
            f"  results      {self.path}/ (metrics.jsonl, events/, logs/)\n"
            f"  another one  RUN_NAME={next_name(self.path)} and the same command\n"
            f"  longer       the same command with a larger train.steps goes on from the last checkpoint, if one was saved\n"
            f"  from zero    the same command with --from-scratch"
        )

    def close(self) -> None:
        """Let another process use the directory. The kernel does this too when this process dies."""
        for lock in self._locks:
            lock.close()
        self._locks.clear()


def _path_of(runs_dir: str | Path, name: str) -> Path:
    """The run directory; the one place where a name becomes a path.

    Raises:
        TriaxisError: the name is not that of one folder in `runs_dir`.
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
            f"run directories are to stand, or move the folder here."
        )
    return path


def _lock_of_run(path: Path) -> FolderLock:
    return FolderLock(path, f"start this one under another name: RUN_NAME={next_name(path)}")


def _lock_of_checkpoints(folder: Path) -> FolderLock:
    return FolderLock(folder, "name another folder by checkpoint.dir")


@contextmanager
def _explaining_runs(runs_dir: str | Path, name: str) -> Iterator[None]:
    advice = "Name a folder that this user can write, by runtime.runs_dir, or start under another name: RUN_NAME=..."
    with explaining_storage(Path(runs_dir) / name, "what this run writes", advice):
        yield


@contextmanager
def _explaining_checkpoints(folder: Path) -> Iterator[None]:
    with explaining_storage(folder, "checkpoints", "Name a folder that this user can write, by checkpoint.dir."):
        yield


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
