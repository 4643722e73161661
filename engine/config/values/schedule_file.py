"""Parse pipeline schedules written as text, and read the schedule files that a configuration names.

schedule=mine pp=2 vpp=1 microbatches=3 forward_only=no placement=loop        placement is optional; default: loop
rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
rank 1: 0F0 0B0 0F1 0I1 0F2 0W1 0B2
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from triaxis.engine.config.values.places import local_path
from triaxis.engine.errors import ScheduleError
from triaxis.engine.storage.state_files import read_text

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
"""Regular expression for an action: chunk, kind, microbatch."""

PLACEMENTS = ("loop", "v")
"""Names for the two ways to place stages on ranks (`triaxis.engine.layout.placement`)."""

_HEADER = re.compile(
    r"schedule=(\S+) pp=(\d{1,7}) vpp=(\d{1,7}) microbatches=(\d{1,9}) forward_only=(yes|no)(?: placement=(\S+))?"
)
_ROW = re.compile(r"rank (\d+):(.*)")
_MOST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ScheduleText:
    """A schedule as text: the sizes from its first line, and the words in each rank's row.

    Attributes:
        name: the schedule's name, such as its algorithm or author.
        placement: one of `PLACEMENTS`.
        rows: one tuple per rank; each word is an action (chunk, kind, microbatch) such as `0F3`.
    """

    name: str
    pp: int
    vpp: int
    num_microbatches: int
    forward_only: bool
    placement: str
    rows: tuple[tuple[str, ...], ...]

    @property
    def is_v(self) -> bool:
        """Whether a rank's two chunks are placed in a V (`engine/layout/placement.py`)."""
        return self.placement == "v"

    @property
    def defers_weight_gradients(self) -> bool:
        """Whether some weight gradients are computed apart from the backward."""
        return any("W" in word for row in self.rows for word in row)


def parse_schedule(text: str) -> ScheduleText:
    """Parse a schedule in the module's format; empty lines and lines that begin with `#` are skipped.

    `triaxis.engine.pipeline.validate.check` decides whether the actions make a correct schedule.

    Raises:
        ScheduleError: the text does not have the format; the message lists up to five faults.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    header = _HEADER.fullmatch(lines[0]) if lines else None
    if header is None:
        raise ScheduleError(
            f"the first line of a schedule is {(lines[0] if lines else '')[:120]!r} and must read 'schedule=NAME pp=P vpp=V "
            "microbatches=M forward_only=yes|no [placement=loop|v]'. Without the sizes the rows have no meaning; add it."
        )
    name, pp, vpp, num_microbatches, forward_only, placement = header.groups()
    problems = []
    if placement not in (None, *PLACEMENTS):
        problems.append(
            f"placement={placement} must be {' or '.join(PLACEMENTS)}: which rank holds a stage would be a guess. Correct it."
        )
    if placement == "v" and vpp != "2":
        problems.append(
            f"placement=v with vpp={vpp}: a V has two model chunks per rank, so chunks would have no stage. Write vpp=2."
        )
    rows = []
    for rank, line in enumerate(lines[1:]):
        row = _ROW.fullmatch(line)
        if row is None or int(row.group(1)) != rank:
            problems.append(
                f"{line[:120]!r} stands where 'rank {rank}: ...' must stand: rows come in the order of ranks, one each. A row in "
                "another place would run on another rank; put the rows in order."
            )
            break
        words = tuple(row.group(2).split())
        problems += [not_an_action(word) for word in words if ACTION.fullmatch(word) is None]
        rows.append(words)
    if problems:
        more = f" And {len(problems) - _MOST_SHOWN} more." if len(problems) > _MOST_SHOWN else ""
        raise ScheduleError(" ".join(problems[:_MOST_SHOWN]) + more)
    return ScheduleText(
        name,
        int(pp),
        int(vpp),
        int(num_microbatches),
        forward_only == "yes",
        placement or PLACEMENTS[0],
        tuple(rows),
    )


def not_an_action(word: str) -> str:
    """Build the message for a word that is not an action."""
    return (
        f"{word[:40]!r} is no action: an action is a chunk, one of F B I W and a microbatch, such as 0F3. "
        "A schedule with an unreadable action cannot be run; correct the text."
    )


@dataclass(frozen=True, slots=True)
class ScheduleFile:
    """A schedule file, read together with the configuration; as a configuration value it is written as its path.

    Attributes:
        path: path as given; a relative one is relative to the working directory.
        text: the file's content when it was read.
    """

    path: str
    text: ScheduleText

    def __str__(self) -> str:
        return self.path

    @classmethod
    def read(cls, path: str) -> "ScheduleFile":
        """Read and parse a schedule file.

        Raises:
            ValueError: the file cannot be read, or is not a schedule.
        """
        try:
            return cls(path, parse_schedule(read_text(Path(local_path(path)))))
        except OSError as error:
            raise ValueError(
                f"the file cannot be read: {error.strerror or error}; give the path of a schedule's text"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError("the file is no text; give one as `triaxis schedule print` writes it") from error
        except ScheduleError as error:
            raise ValueError(f"the file is no schedule: {str(error).rstrip('.')}") from error

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate a path by reading the file; serialize as the path."""
        return core_schema.no_info_plain_validator_function(
            cls._of, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def _of(cls, value: object) -> "ScheduleFile":
        if isinstance(value, ScheduleFile):
            return value
        if not isinstance(value, str) or not value:
            raise ValueError("must be the path of a schedule's text")
        return cls.read(value)
