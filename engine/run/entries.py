"""Names the entries of a run directory and checks what is there.

Crashes, full disks and people leave a directory in any state. So all entries are checked before any is opened: a FIFO would block a
rank forever.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from triaxis.engine.checkpoint.directory import CHECKPOINTS, CONFIG, LATEST
from triaxis.engine.checkpoint.history import SKIPPED
from triaxis.engine.checkpoint.lock import LOCK
from triaxis.engine.checkpoint.resume_rules import changes, refuse
from triaxis.engine.config.names.earlier import translated
from triaxis.engine.config.quantities.plan import planned_steps
from triaxis.engine.config.tree import Config
from triaxis.engine.config.yaml_text import read_yaml
from triaxis.engine.errors import CheckpointError, TriaxisError
from triaxis.engine.storage.state_files import kind_of, read_object, read_regular
from triaxis.engine.storage.user_module import EXTENSION

METRICS = "metrics.jsonl"
EVENTS = "events"
"""Folder of event files, one file per node."""
OLD_FILE = "events.jsonl"
"""Single event file for all nodes, which earlier versions wrote."""
SAVED = "saved"
FINISHED = "finished"
STARTING_OVER = "starting_over"
WANDB_ID = "wandb_id"
WANDB_ALERTED = "wandb_alerted"
LOGS = "logs"

FILES = (
    *(CONFIG, METRICS, SAVED, FINISHED, STARTING_OVER, WANDB_ID, WANDB_ALERTED, LOCK, OLD_FILE),
    *("timeline.json", "slurm.json"),
)
FOLDERS = (EVENTS, LOGS, CHECKPOINTS, "profile", "timeline", "memory", "hangs", "wandb", "tensorboard", EXTENSION)

_ATTEMPT = re.compile(r"attempt_(\d{1,9})")


def next_attempt(path: Path) -> int:
    """Return the next attempt's number, from 0. Entries in `logs/` that are not named `attempt_<n>` are ignored."""
    return max(_attempts(path), default=-1) + 1


def last_attempt(path: Path) -> int:
    """Return the last attempt's number, or 0 if there was no attempt."""
    return max(_attempts(path), default=0)


def _attempts(path: Path) -> list[int]:
    logs = path / LOGS
    names = [entry.name for entry in logs.iterdir()] if logs.is_dir() else []
    return [int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name))]


def events_file(run: Path, node: int) -> Path:
    return run / EVENTS / f"node_{node:05d}.jsonl"


def events_files(run: Path) -> list[Path]:
    """Return a run directory's event files in the order of the nodes. An earlier version's `events.jsonl` comes first."""
    return [path for path in (run / OLD_FILE,) if path.is_file()] + sorted((run / EVENTS).glob("node_*.jsonl"))


def check_links(path: Path) -> None:
    """Refuse entries directly in the run directory that are links to places outside.

    Raises:
        TriaxisError: some links lead out of the directory; the message names them.
    """
    inside = _resolved(path)
    links = [entry for entry in path.iterdir() if entry.is_symlink() and not _resolved(entry).is_relative_to(inside)]
    if links:
        raise TriaxisError(
            f"links lead out of the run directory: {', '.join(f'{link} -> {link.readlink()}' for link in sorted(links))}. The run "
            "would write where its configuration does not say. Remove them; checkpoint.dir and runtime.runs_dir choose other disks."
        )


def _resolved(path: Path) -> Path:
    """Resolve all links in a path. Circular links, for which `Path.resolve` raises, are kept."""
    return Path(os.path.realpath(path))


def check_kinds(path: Path) -> None:
    """Refuse a run directory in which `FILES` or event files are not regular files, or `FOLDERS` not folders.

    Raises:
        TriaxisError: some entries are of another kind, such as a folder; the message names all of them.
        OSError: an entry cannot be examined.
    """
    found = [*_of_other_kind(path, FILES, stat.S_IFREG), *_of_other_kind(path, FOLDERS, stat.S_IFDIR)]
    if (path / EVENTS).is_dir():
        names = tuple(entry.name for entry in (path / EVENTS).glob("node_*.jsonl"))
        found += _of_other_kind(path / EVENTS, names, stat.S_IFREG)
    _refuse(path, found)


def check_kinds_of_checkpoints(folder: Path) -> None:
    """Refuse entries in a checkpoint folder that should be regular files but are not.

    Raises:
        TriaxisError: `latest`, `skipped.json` or the lock is of another kind; the message names all of them.
        OSError: an entry cannot be examined.
    """
    _refuse(folder, list(_of_other_kind(folder, (LATEST, SKIPPED, LOCK), stat.S_IFREG)))


def _refuse(folder: Path, found: Sequence[str]) -> None:
    if found:
        raise TriaxisError(
            f"{folder} holds unexpected entries:\n"
            + "\n".join(f"  {line}" for line in found)
            + "\nThe run could not write there. Remove or rename them, and give the command again."
        )


def _of_other_kind(folder: Path, names: tuple[str, ...], kind: int) -> Iterator[str]:
    for name in names:
        try:
            mode = (folder / name).stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if stat.S_IFMT(mode) != kind:
            yield f"{folder / name} is {kind_of(mode)}, and must be {kind_of(kind)}"


def has_results(path: Path) -> bool:
    """Whether config.yaml exists and metrics.jsonl is not empty: an attempt has completed a step."""
    metrics = path / METRICS
    return (path / CONFIG).is_file() and metrics.is_file() and metrics.stat().st_size > 0


def check_same_config(path: Path, config: Config) -> None:
    """Refuse a configuration that differs from config.yaml so much that it is another run.

    Raises:
        TriaxisError: fields differ that neither the resume rules nor `checkpoint.accept` allow, or config.yaml is damaged; the
            message names the fields or the damage.
        OSError: config.yaml cannot be read.
    """
    written = path / CONFIG
    try:
        there = read_yaml(read_regular(written).decode())
    except (ValueError, yaml.YAMLError) as error:
        raise _damaged(written, f"it is not valid YAML ({error})", _LOST_CONFIG) from None
    if not isinstance(there, Mapping):
        raise _damaged(written, "it holds no fields", _LOST_CONFIG)
    try:
        refuse(changes(translated(there), config), config.checkpoint.accept, f"the run in {path} ({CONFIG})")
    except CheckpointError as error:
        raise TriaxisError(
            f"{error}\nThe metrics would mix two runs. To keep them apart, start this one under another name: "
            f"RUN_NAME={next_name(path)}"
        ) from None


def read_finished(path: Path, config: Config) -> Mapping[str, Any] | None:
    """Read a finished run's results; None if the run is not finished.

    A run with a saved checkpoint is not finished if the configuration now plans more steps.

    Raises:
        TriaxisError: `finished` is damaged.
        OSError: `finished` cannot be read.
    """
    marker = path / FINISHED
    try:
        results = read_object(marker)
        steps = None if results is None else results.get("steps", 0)
        if isinstance(steps, bool) or not isinstance(steps, int | None):
            raise ValueError(f"steps = {steps!r} is not a whole number")
    except ValueError as error:
        raise _damaged(marker, str(error), _LOST_RESULTS) from None
    if results is None:
        return None
    planned = planned_steps(config)
    longer = planned is not None and planned > results.get("steps", planned)
    return None if longer and (path / SAVED).exists() else results


_LOST_CONFIG = "it records the configuration that produced this run's metrics"
_LOST_RESULTS = "it records that this run is finished, and its results"


def _damaged(path: Path, problem: str, purpose: str) -> TriaxisError:
    return TriaxisError(
        f"{path} is damaged: {problem}; {purpose}. Restore it, or remove it: the run then goes on from its newest checkpoint. "
        f"Or start under another name: RUN_NAME={next_name(path.parent)}"
    )


def next_name(path: Path) -> str:
    """Return the first free name among name-2, name-3, ..."""
    number = 2
    while os.path.lexists(path.parent / f"{path.name}-{number}"):
        number += 1
    return f"{path.name}-{number}"


def check_checkpoint_folder(folder: Path, run: Path) -> None:
    """Refuse a checkpoint folder that is a run directory, or lies in another run's directory.

    Args:
        folder: `checkpoint.dir`.
        run: this run's directory; folders inside it are fine.

    Raises:
        TriaxisError: the folder is this run's directory, or lies in another run's.
        OSError: the path cannot be followed.
    """
    resolved, own = _resolved(folder), _resolved(run)
    if resolved == own:
        raise TriaxisError(
            f"checkpoint.dir = {folder} is the run directory itself, where other files are. Leave it out (checkpoints go to "
            f"{run / CHECKPOINTS}) or name a folder of its own."
        )
    for outer in (resolved, *resolved.parents):
        if outer == own:
            return
        if _is_run(outer):
            raise TriaxisError(
                f"checkpoint.dir = {folder} lies in {outer}, which is the directory of another run: each would remove and replace "
                f"checkpoints of the other. Leave it out (checkpoints go to {run / CHECKPOINTS}) or name a folder outside of "
                f"other runs. To begin with checkpoints of that run: checkpoint.load={folder}"
            )


def _is_run(path: Path) -> bool:
    if not ((path / LOCK).is_file() or (path / CONFIG).is_file()):
        return False
    return any(_ATTEMPT.fullmatch(entry.name) for entry in (path / LOGS).glob("attempt_*"))


def known_wandb_id(path: Path) -> str | None:
    """Return the id of the run's wandb page. None if the file is unreadable or not one printable line."""
    try:
        text = read_regular(path, 1024).decode().strip()
    except (OSError, ValueError):
        return None
    return text if text and text.isprintable() else None
