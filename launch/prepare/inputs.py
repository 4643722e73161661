"""Find a corpus's input files from paths, globs and folders.

texts/a.txt      the file, whatever its ending
'texts/**/*.md'  the matching files, whatever their endings; if only folders match, the folders
texts            the files with a known text ending in this folder and below, except hidden files

In a folder, a .json that is one object over several lines, such as a tokenizer, is left out.
"""

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triaxis.engine.data.corpus.findings import OnBad
from triaxis.engine.errors import DataError, shown
from triaxis.engine.storage.elsewhere import how_to_bring, why_no_path
from triaxis.launch.prepare.readers import READERS, ending_of, is_input_of_folder

NAMES_SHOWN = 5


@dataclass(slots=True)
class Inputs:
    """The input files found, each once, with counts of their other names and of files left out."""

    files: tuple[Path, ...] = ()
    patterns: tuple[str, ...] = ()
    """The first pattern that named each file, one per file."""
    num_links: int = 0
    """Number of further names (hard or symbolic links) of these files; a file is read once under its first name."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Number of files in given folders that are not read as inputs, by ending."""


def find_inputs(patterns: Sequence[str], on_bad: OnBad = "stop") -> Inputs:
    """Find the files that paths, globs and folders name.

    Raises:
        DataError: a pattern matches no input file.
        DataError: files are empty or unreadable, and `on_bad` is stop.
    """
    found: dict[tuple[int, int], list[tuple[Path, str]]] = {}
    """Each file's names and their patterns, by device and inode."""
    inputs = Inputs()
    for pattern in patterns:
        if (why := why_no_path(pattern)) and not os.path.exists(pattern):  # noqa: PTH110
            raise DataError(f"--input {shown(pattern)} names no file. {why}")
        # Path.glob accepts no absolute patterns.
        matches = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))] or [Path(pattern)]  # noqa: PTH207
        # Path.is_dir raises for a name that is longer than any file's.
        folders = [path for path in matches if os.path.isdir(path)]  # noqa: PTH112
        files = [path for path in matches if os.path.isfile(path)] or [  # noqa: PTH113
            path for folder in folders for path in _files_below(folder, inputs.passed_over)
        ]
        if not files:
            what = "is a folder without text" if folders else "names no file"
            if not folders and os.path.exists(pattern):  # noqa: PTH110
                raise DataError(
                    f"--input {pattern!r} is a FIFO or a device: it cannot be read twice, as a preparation that goes on after a "
                    "kill does. Write its content to a file first."
                )
            if how := how_to_bring(pattern):
                raise DataError(f"--input {shown(pattern)} {what}.{how}")
            raise DataError(
                f"--input {shown(pattern)} {what}. Give files, a folder with files that end in {', '.join(READERS)}, or a pattern "
                "in quotes, for example 'texts/*.md', or 'texts/**/*.md' for all folders below."
            )
        for path in files:
            status = path.stat()
            found.setdefault((status.st_dev, status.st_ino), []).append((path, pattern))
    firsts = [names[0] for names in found.values()]
    inputs.files, inputs.patterns = tuple(path for path, _ in firsts), tuple(pattern for _, pattern in firsts)
    inputs.num_links = sum(len({path for path, _ in names}) - 1 for names in found.values())
    if on_bad == "stop":
        _refuse_unusable(inputs.files)
    return inputs


def _files_below(folder: Path, passed_over: Counter[str]) -> Iterator[Path]:
    """Yield the input files below a folder, sorted by path. Other files are counted in `passed_over`, by ending."""
    paths = []
    for above, below, names in os.walk(folder):
        below[:] = [name for name in below if not name.startswith(".")]
        paths += [Path(above, name) for name in names if not name.startswith(".")]
    for path in sorted(paths, key=str):
        if _is_input(path):
            yield path
        else:
            passed_over[ending_of(path) or path.suffix or path.name] += 1


def _is_input(path: Path) -> bool:
    """Whether a file found in a folder is an input.

    An unreadable file with a known ending counts as an input, so that it is reported later.
    """
    return is_input_of_folder(path) if os.access(path, os.R_OK) else ending_of(path) in READERS


def _refuse_unusable(files: Sequence[Path]) -> None:
    for what, wrong in (
        ("empty", [path for path in files if path.stat().st_size == 0]),
        ("not readable by this user", [path for path in files if not os.access(path, os.R_OK)]),
    ):
        if wrong:
            more = f" and {len(wrong) - NAMES_SHOWN:,} more" if len(wrong) > NAMES_SHOWN else ""
            raise DataError(
                f"{len(wrong):,} of {len(files):,} input files {'is' if len(wrong) == 1 else 'are'} {what}: "
                f"{', '.join(map(str, wrong[:NAMES_SHOWN]))}{more}. A document without text would be an end-of-document "
                f"token alone, and the loss of a silently skipped file would go unnoticed. Repair them, leave them out, or "
                f"count them with --on-bad skip."
            )
