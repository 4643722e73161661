"""The run directory: everything that a run leaves behind, in one place (no torch here).

    runs/<name>/                  name: runtime.name, or the config's stem; <stem>-<jobid> under SLURM, kept over requeues
        config.yaml               resolved: what was asked for, with every default
        metrics.jsonl             one object per step, appended over all attempts
        events/node_00000.jsonl   starts, ends, validations, trouble; a file per node, read as one (`engine.telemetry.events`)
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
        lock                      held by rank 0 while the run lives

Rank 0 calls `RunDirectory.create`; the caller tells the others its attempt, and they call `RunDirectory.join`.
"""

import errno
import fcntl
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml

from engine.checkpoint.changes import changes, refuse
from engine.checkpoint.directory import CheckpointDirectory
from engine.config import Config, ProfileConfig, planned_steps
from engine.config_load import to_yaml
from engine.data.files import write_atomically
from engine.errors import CheckpointError, TriaxisError
from engine.telemetry.events import events_file


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
        swept: what attempts that died left half-written among the checkpoints, and was removed.
        set_aside: where the checkpoints were moved for a start from scratch.
    """

    def __init__(
        self, path: Path, attempt: int, finished: Mapping[str, Any] | None, locks: Sequence[TextIO] = ()
    ) -> None:
        self.path = path
        self.attempt = attempt
        self.finished = finished
        self.swept: Sequence[str] = ()
        self.set_aside: Path | None = None
        self._locks = locks

    @classmethod
    def create(cls, config: Config, runs_dir: str | Path, name: str, *, from_scratch: bool = False) -> "RunDirectory":
        """Open the directory for a new attempt, on the one rank that decides (rank 0).

        A finished run is left untouched, unless the configuration now asks for more steps: `finished` tells what it came
        to, and there is nothing to start.

        Args:
            config: of this attempt. What may differ from earlier attempts' is said in `engine/checkpoint/changes.py`.
            runs_dir: parent of run directories.
            name: of this one.
            from_scratch: begin at step 0 again whatever is there; checkpoints are moved aside, not removed.

        Raises:
            TriaxisError: the name is no folder name; it, or something in it, is a link to somewhere else; the directory holds
                steps of a run with another configuration (attempts that never made a step have nothing to protect); or a run that
                is alive writes there.
        """
        path = _path_of(runs_dir, name)
        path.mkdir(parents=True, exist_ok=True)
        _check_links(path)
        locks = [_locked(path)]
        try:
            if _has_results(path) and not from_scratch:
                _check_same_config(path, config)
            finished = None if from_scratch else _read_finished(path, config)
            attempts = [int(folder.name.removeprefix("attempt_")) for folder in (path / "logs").glob("attempt_*")]
            if finished is not None:
                locks[0].close()
                return cls(path, max(attempts, default=0), finished)
            run = cls(path, max(attempts, default=-1) + 1, None, locks)
            checkpoints = run.checkpoints(config)
            if config.checkpoint.interval is not None and config.checkpoint.dir is not None:
                checkpoints.path.mkdir(parents=True, exist_ok=True)
                locks.append(_locked(checkpoints.path))
            run.swept = checkpoints.sweep()
            if from_scratch:
                run.set_aside = checkpoints.set_aside()
                (path / "saved").unlink(missing_ok=True)
            (path / "finished").unlink(missing_ok=True)
            write_atomically(path / "config.yaml", [to_yaml(config, describe=True).encode()])
            run.rank_log(0).parent.mkdir(parents=True)
        except BaseException:
            for lock in locks:
                lock.close()
            raise
        return run

    @classmethod
    def look(cls, config: Config, runs_dir: str | Path, name: str) -> "RunDirectory | None":
        """The directory if it holds a finished run of this configuration, else None; nothing is changed.

        Raises:
            TriaxisError: the name is no folder name, or it holds steps of a run with another configuration.
        """
        path = _path_of(runs_dir, name)
        if not _has_results(path):
            return None
        _check_same_config(path, config)
        finished = _read_finished(path, config)
        return None if finished is None else cls(path, 0, finished)

    @classmethod
    def join(cls, runs_dir: str | Path, name: str, attempt: int) -> "RunDirectory":
        """The directory as every other rank sees it, whether or not its node shares the first node's files."""
        return cls(_path_of(runs_dir, name), attempt, None)

    def checkpoints(self, config: Config) -> CheckpointDirectory:
        """The folder of this run's checkpoints."""
        return CheckpointDirectory(Path(config.checkpoint.dir or self.path / "checkpoints"))

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
        """Where ranks of this attempt write what they do when the run hangs (`engine/resilience/hang.py`)."""
        return self.path / "hangs" / f"attempt_{self.attempt:02d}"

    def rank_log(self, rank: int) -> Path:
        return self.path / "logs" / f"attempt_{self.attempt:02d}" / f"rank_{rank:05d}.log"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def events(self, node: int) -> Path:
        """The file in which the ranks of a node of the layout write down events."""
        return events_file(self.path, node)

    @property
    def wandb_id(self) -> Path:
        return self.path / "wandb_id"

    @property
    def wandb_alerted(self) -> Path:
        return self.path / "wandb_alerted"

    def known_wandb_id(self) -> str | None:
        """The id of the run's page; None where it has none."""
        return self.wandb_id.read_text().strip() if self.wandb_id.exists() else None

    @property
    def has_saved(self) -> bool:
        """Whether an attempt of this run has completed a checkpoint."""
        return (self.path / "saved").exists()

    def mark_saved(self, folder: Path, step: int) -> None:
        """Remember the first checkpoint: from now on the run resumes, and never starts from random weights unasked."""
        if not self.has_saved:
            record = {"first_checkpoint": str(folder), "step": step}
            write_atomically(self.path / "saved", [(json.dumps(record, indent=2) + "\n").encode()])

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def finish(self, **results: Any) -> None:
        """Mark the run as done: `results` (steps, loss, val_loss, ...) as JSON, complete or not there."""
        write_atomically(self.path / "finished", [(json.dumps(results, indent=2) + "\n").encode()])
        self.finished = results

    def finished_message(self) -> str:
        """What a second start of a finished run says: that it is done, where its results are, how to start another."""
        assert self.finished is not None, "only a finished run has this message"
        results = ", ".join(f"{key} {_short(value)}" for key, value in self.finished.items() if value is not None)
        return (
            f"The run {self.path.name} is finished ({results}); nothing was started.\n"
            f"  results      {self.path}/ (metrics.jsonl, events/, logs/)\n"
            f"  another one  RUN_NAME={_next_name(self.path)} and the same command\n"
            f"  longer       the same command with a larger train.steps goes on from the last checkpoint, if one was saved\n"
            f"  from zero    the same command with --from-scratch"
        )

    def close(self) -> None:
        """Let another process use the directory. The kernel does this too when this process dies."""
        for lock in self._locks:
            lock.close()
        self._locks = ()


def _path_of(runs_dir: str | Path, name: str) -> Path:
    """The run directory; the one place where a name becomes a path.

    Raises:
        TriaxisError: the name is not that of one folder in `runs_dir`.
    """
    path = Path(runs_dir) / name
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise TriaxisError(
            f"runtime.name = {name!r} must be the name of one folder, or the run would write outside of {runs_dir}. "
            f"Leave slashes and control characters away; runtime.runs_dir says where run directories go."
        )
    if path.is_symlink():
        raise TriaxisError(
            f"{path} is a link to {path.readlink()}, so the run would write outside of {runs_dir}. Set runtime.runs_dir to where "
            f"run directories are to stand, or move the folder here."
        )
    return path


def _check_links(path: Path) -> None:
    """Refuse links out of the run directory: what a run writes stays in the places that its configuration names.

    Raises:
        TriaxisError: naming the links.
    """
    inside = path.resolve()
    links = [entry for entry in path.iterdir() if entry.is_symlink() and not entry.resolve().is_relative_to(inside)]
    if links:
        raise TriaxisError(
            f"links lead out of the run directory: {', '.join(f'{link} -> {link.readlink()}' for link in sorted(links))}. The run "
            "would write where its configuration does not say. Remove them; checkpoint.dir and runtime.runs_dir choose other disks."
        )


def _locked(path: Path) -> TextIO:
    lock = (path / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise TriaxisError(
            f"another run is alive and writes in {path}; two would mix their metrics. Wait for it or end it, or start this one "
            f"under another name: RUN_NAME={_next_name(path)}"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            lock.close()
            raise
        # A file system without locks: nothing tells two runs apart there, and that is no reason not to train.
    return lock


def _read_finished(path: Path, config: Config) -> Mapping[str, Any] | None:
    """What the run came to; None where it is not done, or has a checkpoint from which it is to go on for more steps."""
    marker = path / "finished"
    if not marker.exists():
        return None
    results: dict[str, Any] = json.loads(marker.read_text())
    planned = planned_steps(config)
    longer = planned is not None and planned > results.get("steps", planned)
    return None if longer and (path / "saved").exists() else results


def _has_results(path: Path) -> bool:
    metrics = path / "metrics.jsonl"
    return (path / "config.yaml").exists() and metrics.exists() and metrics.stat().st_size > 0


def _check_same_config(path: Path, config: Config) -> None:
    written = path / "config.yaml"
    there = yaml.safe_load(written.read_text()) or {}
    try:
        refuse(changes(there, config), config.checkpoint.accept, f"the run in {path}")
    except CheckpointError as error:
        raise TriaxisError(
            f"{error}\nIts metrics would no longer be those of one run. Or start this one under another name: "
            f"RUN_NAME={_next_name(path)}"
        ) from None


def _next_name(path: Path) -> str:
    """The first of name-2, name-3, ... that is free."""
    number = 2
    while (path.parent / f"{path.name}-{number}").exists():
        number += 1
    return f"{path.name}-{number}"


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
