"""The folder of a run's checkpoints: which are complete, which is newest, what is swept and what is kept (no torch here).

    checkpoints/
        step_00000900/                  complete: it was renamed to this name when every byte of it was on the disk
        step_00001000/
        latest                          a text file: step_00001000
        step_00001100.attempt_02/       being written, or left by an attempt that died: swept by the next one
        lock                            held by the one process that may write here

Order of a save: all files are written and fsynced under the second name; manifest.json, then its hash; the folder is
renamed; `latest` is replaced. A kill at any point leaves the older checkpoints and `latest` as they were.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.manifest import Manifest, read_manifest
from engine.data.files import sync_folder, write_atomically
from engine.errors import CheckpointError

LATEST = "latest"
_STEP = re.compile(r"step_(\d{8,})")
_PARTIAL = re.compile(r"step_\d{8,}\.(attempt_\d+|replaced)")
_SET_ASIDE = "set_aside_"


def step_name(step: int) -> str:
    return f"step_{step:08d}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that may be loaded: its folder and its manifest, which names files of the right sizes."""

    folder: Path
    manifest: Manifest


class CheckpointDirectory:
    """One folder of checkpoints. Only the holder of the run's lock may call what changes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> dict[int, Path]:
        """Folders that bear a finished name, by step, ascending."""
        if not self.path.is_dir():
            return {}
        found = {int(match[1]): entry for entry in self.path.iterdir() if (match := _STEP.fullmatch(entry.name))}
        return dict(sorted(found.items()))

    def latest(self) -> Path | None:
        """The folder that `latest` names; None where there is no such file or it names nothing of this folder."""
        try:
            name = (self.path / LATEST).read_text(errors="replace").strip()
        except OSError:
            return None
        return self.path / name if _STEP.fullmatch(name) else None

    def candidates(self, damaged: list[str]) -> Iterator[Candidate]:
        """Complete checkpoints, the one to load first: what `latest` names, then the others, newest first.

        A folder that is not complete is described in `damaged` and passed over.
        """
        first = self.latest()
        if first is not None and (candidate := _look(first, damaged)) is not None:
            yield candidate
        others = [
            candidate
            for folder in self.steps().values()
            if folder != first and (candidate := _look(folder, damaged)) is not None
        ]
        # Newer is what a later attempt wrote: an attempt that went back to an older checkpoint has lower steps.
        others.sort(key=lambda candidate: (candidate.manifest.attempt, candidate.manifest.state.step), reverse=True)
        yield from others

    def step_folder(self, step: int) -> Path:
        """Where the complete checkpoint of `step` is, or will be."""
        return self.path / step_name(step)

    def partial(self, step: int, attempt: int) -> Path:
        """Where the checkpoint of `step` is written before it is complete."""
        return self.path / f"{step_name(step)}.attempt_{attempt:02d}"

    def commit(self, partial: Path, step: int) -> Path:
        """Give a complete checkpoint its name, then point `latest` at it.

        A checkpoint of the same step (an attempt that came this way before, or one that was found damaged) is moved away
        first and removed afterwards.

        Raises:
            OSError: the folder cannot be written.
        """
        final = self.path / step_name(step)
        replaced = self.path / f"{step_name(step)}.replaced"
        sync_folder(partial)
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        sync_folder(self.path)
        write_atomically(self.path / LATEST, [f"{final.name}\n".encode()])
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def sweep(self) -> list[str]:
        """Remove what attempts that died left half-written; returns the names."""
        dead = [entry for entry in self._entries() if _PARTIAL.fullmatch(entry.name) or entry.name.endswith(".partial")]
        for entry in dead:
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        return sorted(entry.name for entry in dead)

    def retire(self, newest: int, keep_last: int | None, keep_every: int | None) -> list[str]:
        """Remove checkpoints that the retention does not keep; returns their names.

        Args:
            newest: the step that was just saved: complete for certain, and always kept.
            keep_last: of the steps up to `newest`, how many to keep; None keeps all.
            keep_every: steps that are multiples of it are kept as well.
        """
        if keep_last is None:
            return []
        before = [step for step in self.steps() if step < newest]
        gone = [
            step for step in before[: max(0, len(before) - (keep_last - 1))] if keep_every is None or step % keep_every
        ]
        for step in gone:
            folder = self.path / step_name(step)
            # Under a name that is swept: a kill half-way must not leave a folder that looks whole.
            doomed = folder.rename(folder.with_name(f"{folder.name}.replaced"))
            shutil.rmtree(doomed)
        return [step_name(step) for step in gone]

    def set_aside(self) -> Path | None:
        """Move all checkpoints into a folder of their own, for a start from zero; returns it (None: there were none)."""
        entries = [entry for entry in self._entries() if _STEP.fullmatch(entry.name) or entry.name == LATEST]
        if not entries:
            return None
        number = sum(entry.name.startswith(_SET_ASIDE) for entry in self._entries())
        folder = self.path / f"{_SET_ASIDE}{number:02d}"
        folder.mkdir()
        # `latest` first: without it and with half of the steps moved, a kill here still leaves complete checkpoints.
        for entry in sorted(entries, key=lambda entry: entry.name != LATEST):
            entry.rename(folder / entry.name)
        return folder

    def _entries(self) -> list[Path]:
        return list(self.path.iterdir()) if self.path.is_dir() else []


def find(path: Path) -> Candidate:
    """The checkpoint that a user's path means: a checkpoint, a folder of checkpoints (its latest), or a run directory.

    Raises:
        CheckpointError: there is none, or it is damaged; complete ones beside it are named.
    """
    if _STEP.fullmatch(path.name) or (path / "manifest.json").exists():
        try:
            return Candidate(path, read_manifest(path))
        except CheckpointError as error:
            others = [
                str(candidate.folder)
                for candidate in CheckpointDirectory(path.parent).candidates([])
                if candidate.folder != path
            ]
            if not others or not path.exists():
                raise
            raise CheckpointError(f"{error}\nComplete beside it: {', '.join(others[:3])}") from None
    damaged: list[str] = []
    for folder in (path, path / "checkpoints"):
        candidate = next(CheckpointDirectory(folder).candidates(damaged), None)
        if damaged:
            complete = "No other one is complete." if candidate is None else f"Complete is: {candidate.folder}"
            raise CheckpointError(f"{damaged[0]}\n{complete}")
        if candidate is not None:
            return candidate
    what = "there is no such folder" if not path.exists() else "no step_<number> folder is in it"
    raise CheckpointError(
        f"{path}: {what}, so there is nothing to load. Starting anyway would train from random weights. Give a checkpoint "
        "(step_00001000), a folder of checkpoints, or a run directory."
    )


def _look(folder: Path, damaged: list[str]) -> Candidate | None:
    try:
        return Candidate(folder, read_manifest(folder))
    except CheckpointError as error:
        damaged.append(str(error))
        return None
