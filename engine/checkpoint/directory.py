"""Finds, commits, sweeps and retires the checkpoints in a run's checkpoint folder.

    checkpoints/
        step_00000900/                  a complete checkpoint, renamed to this name when every byte was on the disk
        step_00001000/
        latest                          a text file with the name step_00001000
        skipped.json                    samples skipped since a rollback (`engine/checkpoint/history.py`)
        step_00001100.attempt_02/       being written, or left by a dead attempt and swept by the next one
        step_00000900.replaced/         being replaced by another of the same step
        step_00000800.retired/          being removed
        lock                            held by the only process that may write here

A save writes and fsyncs all tensor files in the folder with the attempt in its name. Then manifest.json is written, and after that
the manifest's hash. Last, the folder is renamed and `latest` is replaced. A kill at any point leaves the older checkpoints and
`latest` intact. Replacing a checkpoint of the same step takes two renames. Between the two, the `.replaced` folder counts as the
checkpoint.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from triaxis.engine.checkpoint.format.manifest import MANIFEST, Manifest, read_manifest
from triaxis.engine.checkpoint.history import SKIPPED
from triaxis.engine.config.yaml_text import read_yaml
from triaxis.engine.errors import CheckpointError
from triaxis.engine.storage.files import sync_folder, write_atomically
from triaxis.engine.storage.state_files import read_regular

CONFIG = "config.yaml"
"""Name of the resolved configuration's file in a run directory."""
CHECKPOINTS = "checkpoints"
LATEST = "latest"
_STEP = re.compile(r"step_(\d{8,})")
_REPLACED = re.compile(r"step_(\d{8,})\.replaced")
_PARTIAL = re.compile(r"step_\d{8,}\.(attempt_\d+|replaced|retired)")
_SET_ASIDE = re.compile(r"set_aside_(\d+)")


def step_name(step: int) -> str:
    return f"step_{step:08d}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A complete checkpoint's folder and valid manifest. All files have the sizes in the manifest."""

    folder: Path
    manifest: Manifest


class CheckpointDirectory:
    """One folder of checkpoints. Only the holder of the run's lock may call methods that change the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> dict[int, Path]:
        """Map each step to its finished folder, going by names alone, ascending.

        A `.replaced` folder counts if the step has no other folder.
        """
        entries = self._entries()
        found = {int(match[1]): entry for entry in entries if (match := _REPLACED.fullmatch(entry.name))}
        found |= {int(match[1]): entry for entry in entries if (match := _STEP.fullmatch(entry.name))}
        return dict(sorted(found.items()))

    def latest(self) -> Path | None:
        """Return the checkpoint folder that the file `latest` names, even if that folder is missing.

        None if the file is missing, or its text is no checkpoint's name.
        """
        try:
            name = read_regular(self.path / LATEST).decode(errors="replace").strip()
        except OSError:
            return None
        match = _STEP.fullmatch(name)
        return self.steps().get(int(match[1]), self.path / name) if match else None

    def candidates(self, damaged: list[str]) -> Iterator[Candidate]:
        """Yield complete checkpoints, best first.

        The checkpoint that `latest` names comes first, then the others, newest first. Damaged or incomplete checkpoints are passed
        over, and their problems appended to `damaged`.
        """
        first = self.latest()
        if first is not None and (candidate := _look(first, damaged)) is not None:
            yield candidate
        others = [
            candidate
            for folder in self.steps().values()
            if folder != first and (candidate := _look(folder, damaged)) is not None
        ]
        # A later attempt is newer, even if its steps are lower after a return to an older checkpoint.
        others.sort(key=lambda candidate: (candidate.manifest.attempt, candidate.manifest.state.step), reverse=True)
        yield from others

    def step_folder(self, step: int) -> Path:
        """Return the path that a complete checkpoint of this step has."""
        return self.path / step_name(step)

    def partial(self, step: int, attempt: int) -> Path:
        """Return the path that a checkpoint has while this attempt writes it."""
        return self.path / f"{step_name(step)}.attempt_{attempt:02d}"

    def commit(self, partial: Path, step: int) -> Path:
        """Rename a complete checkpoint to its final name, point `latest` at it, and return it.

        An existing checkpoint of the same step is moved away first and removed afterwards.

        Raises:
            OSError: the folder cannot be written.
        """
        final = self.step_folder(step)
        replaced = final.with_name(f"{final.name}.replaced")
        sync_folder(partial)
        if final.exists():
            _remove(replaced)
            final.rename(replaced)
        partial.rename(final)
        sync_folder(self.path)
        sync_folder(self.path.parent)  # the first checkpoint has also created this folder
        write_atomically(self.path / LATEST, [f"{final.name}\n".encode()])
        with suppress(OSError):
            _remove(replaced)
        return final

    def sweep(self) -> list[str]:
        """Remove what dead attempts left, and return the removed names, sorted.

        These are half-written, replaced and half-removed checkpoints, and `.partial` files. A `.replaced` folder whose step has
        no other checkpoint gets its final name back.
        """
        for step, folder in self.steps().items():
            if _REPLACED.fullmatch(folder.name):
                folder.rename(self.step_folder(step))
        dead = [entry for entry in self._entries() if _PARTIAL.fullmatch(entry.name) or entry.name.endswith(".partial")]
        for entry in dead:
            _remove(entry)
        return sorted(entry.name for entry in dead)

    def retire(self, newest: int, keep_last: int | None, keep_every: int | None) -> list[str]:
        """Remove checkpoints that the retention rules do not keep, and return their names.

        Checkpoints above step `newest` stay: a run that has gone back to an older step may have left some.

        Args:
            newest: step that was just saved, complete and always kept.
            keep_last: number of checkpoints to keep, counted back from `newest`; None keeps all.
            keep_every: interval in steps; checkpoints at multiples of the interval are kept as well.
        """
        if keep_last is None:
            return []
        before = [step for step in self.steps() if step < newest]
        gone = [
            step for step in before[: max(0, len(before) - (keep_last - 1))] if keep_every is None or step % keep_every
        ]
        for step in gone:
            folder = self.step_folder(step)
            doomed = folder.with_name(f"{folder.name}.retired")
            _remove(doomed)
            # Rename it first, to a name that `sweep` removes: a kill half-way must not leave a folder that looks whole.
            folder.rename(doomed)
            _remove(doomed)
        return [step_name(step) for step in gone]

    def set_aside(self) -> Path | None:
        """Move all finished checkpoints, `latest` and skipped.json into a new folder.

        Return that folder, or None if there was nothing to move. Half-written checkpoints stay.
        """
        names = [entry.name for entry in self._entries()]
        entries = [self.path / name for name in names if _STEP.fullmatch(name) or name in (LATEST, SKIPPED)]
        if not entries:
            return None
        numbers = [int(match[1]) for name in names if (match := _SET_ASIDE.fullmatch(name))]
        folder = self.path / f"set_aside_{max(numbers, default=-1) + 1:02d}"
        folder.mkdir()
        # `latest` first: a kill half-way still leaves complete checkpoints.
        for entry in sorted(entries, key=lambda entry: entry.name != LATEST):
            entry.rename(folder / entry.name)
        return folder

    def _entries(self) -> list[Path]:
        return list(self.path.iterdir()) if self.path.is_dir() else []


def _remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link but not its target. A missing path is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def folder_of_run(run: Path) -> Path:
    """Return a run's checkpoint folder.

    The folder is `checkpoint.dir` in the run's config.yaml, else `checkpoints/` in the run directory.

    A relative `checkpoint.dir` is resolved against the working folder. An unreadable config.yaml is ignored.
    """
    with suppress(OSError, ValueError, yaml.YAMLError):
        match read_yaml(read_regular(run / CONFIG).decode()):
            case {"checkpoint": {"dir": str(folder)}}:
                return Path(folder)
    return run / CHECKPOINTS


def find(path: Path) -> Candidate:
    """Find the checkpoint at a user's path.

    In a folder of checkpoints or a run directory, the latest checkpoint is taken.

    Raises:
        CheckpointError: there is no checkpoint, or the checkpoint is damaged; the message names complete ones in the same folder.
    """
    if _is_one(path):
        try:
            return Candidate(path, read_manifest(path))
        except CheckpointError as error:
            others = [
                str(candidate.folder)
                for candidate in CheckpointDirectory(path.parent).candidates([])
                if candidate.folder != path
            ]
            if not others:
                raise
            raise CheckpointError(
                f"{error}\nComplete checkpoints in the same folder: {', '.join(others[:3])}"
            ) from None
    damaged: list[str] = []
    for folder in (path, folder_of_run(path)):
        candidate = next(CheckpointDirectory(folder).candidates(damaged), None)
        if damaged:
            complete = (
                "No other one is complete." if candidate is None else f"The newest complete one: {candidate.folder}"
            )
            raise CheckpointError(f"{damaged[0]}\n{complete}")
        if candidate is not None:
            return candidate
    raise _nothing(path)


def folders_at(path: Path) -> list[Path]:
    """List every checkpoint at a user's path, complete or not, by step.

    The path may be a checkpoint, a folder of checkpoints or a run directory.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    if _is_one(path) and path.exists():
        return [path]
    for folder in (path, folder_of_run(path)):
        if found := CheckpointDirectory(folder).steps():
            return list(found.values())
    raise _nothing(path)


def _is_one(path: Path) -> bool:
    return _STEP.fullmatch(path.name) is not None or (path / MANIFEST).exists()


def _nothing(path: Path) -> CheckpointError:
    folder = folder_of_run(path)
    elsewhere = "" if folder == path / CHECKPOINTS else f", nor in its checkpoint.dir = {folder}"
    what = "there is no such folder" if not path.exists() else f"it contains no step_<number> folder{elsewhere}"
    return CheckpointError(
        f"{path}: {what}, so there is no checkpoint to read, and the run must not start from random weights instead. Give a "
        "checkpoint (step_00001000), a folder of checkpoints, or a run directory."
    )


def _look(folder: Path, damaged: list[str]) -> Candidate | None:
    try:
        return Candidate(folder, read_manifest(folder))
    except CheckpointError as error:
        damaged.append(str(error))
        return None
