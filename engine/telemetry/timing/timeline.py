"""Draws steps of all ranks on one time axis, for ui.perfetto.dev or chrome://tracing.

    rank 0   | step 12                                                            |
             | data | forward_backward                       | optimizer | other  |
                    | 0F0 | send 0F0 | 0F1 | ...  | 0B0      |
                      | wait tp |                 | wait pp_backward |
    rank 1   | step 12 ...                                                             a row per rank, in the order of the ranks

Actions are named as in the schedule. A group call is named after its sends and receives: `send` with the action that produced the
tensor, `receive` with the action that needs it.

Each rank writes its own file. `merge` combines the files when the run ends, or in `triaxis report --timeline`. The ranks' clocks
are compared before the first traced step (`triaxis.engine.telemetry.timing.clock_offsets`). Each row's name shows the largest
possible clock error.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.errors import TriaxisError
from triaxis.engine.pipeline.actions import Action, Placement
from triaxis.engine.pipeline.lowering import Instruction, Transfer
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.json_text import parse_json
from triaxis.engine.storage.state_files import read_regular
from triaxis.engine.telemetry.timing.marks import Activity

_RANK_FILE = re.compile(r"rank_\d{1,9}\.json")
_ATTEMPT = re.compile(r"attempt_(\d{1,9})")
_MOST_BYTES = 2**30
"""Largest size of one rank's file, in bytes; an event needs about 200."""


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """Facts that tell a rank's timeline row from the other rows.

    Attributes:
        rank: the row's rank, by which rows are ordered.
        world_size: expected number of rows.
        text: the rank's coordinates and host, shown in the row's name.
        pp_rank: the rank's pipeline coordinate.
        placement: the schedule's placement of stages, used to name transfers.
    """

    rank: int
    world_size: int
    text: str
    pp_rank: int
    placement: Placement


class Timeline:
    """One rank's timeline row. `steps` count from 1. `write` creates the folder of `path`."""

    def __init__(self, steps: range, row: RowIdentity, path: Path) -> None:
        self.steps = steps
        self._row = row
        self._path = path
        self._origin_seconds = 0.0
        self._error_seconds = 0.0
        self._events: list[dict[str, Any]] = []

    def set_clock(self, origin_seconds: float, error_seconds: float) -> None:
        """Set this rank's clock reading at the ranks' common time zero, and the largest error."""
        self._origin_seconds, self._error_seconds = origin_seconds, error_seconds

    def add(self, step: int, activities: Sequence[Activity], clock_seconds: Sequence[float]) -> None:
        """Add one step. `clock_seconds` are readings of this rank's clock, one more than `activities`."""
        times = [seconds - self._origin_seconds for seconds in clock_seconds]
        self._slice(f"step {step}", "step", times[0], times[-1], {})
        layers: list[tuple[str, list[Any]]] = [
            ("part", [activity.part for activity in activities]),
            ("instruction", [activity.instruction for activity in activities]),
            ("wait", [activity.wait for activity in activities]),
        ]
        for layer, each in layers:
            began = 0
            for place in range(1, len(each) + 1):
                if place < len(each) and each[place] is each[began] and layer != "wait":
                    continue
                if each[began] is not None:
                    self._named(layer, each[began], times[began], times[place])
                began = place

    def write(self) -> None:
        """Write the rank's file if an added step is not written yet.

        Raises:
            OSError: the file cannot be written.
        """
        if not self._events:
            return
        name = f"rank {self._row.rank}  {self._row.text}"
        if self._row.rank:
            name += f"  ±{self._error_seconds * 1e6:.0f} µs"
        own = {"pid": 0, "tid": self._row.rank}
        meta = [
            {"ph": "M", "name": "thread_name", **own, "args": {"name": name}},
            {"ph": "M", "name": "thread_sort_index", **own, "args": {"sort_index": self._row.rank}},
        ]
        content = {
            "traceEvents": [*meta, *({**event, **own} for event in self._events)],
            "displayTimeUnit": "ms",
            "otherData": {"world_size": self._row.world_size, "clock_error_seconds": self._error_seconds},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, [json.dumps(content).encode()])
        self._events.clear()

    def _named(self, layer: str, what: Any, start: float, stop: float) -> None:
        if layer == "wait":
            name = f"wait {what.axis}" if what.axis else "host read"
            self._slice(name, "wait", start, stop, {"purpose": what.purpose, "op": what.op})
        elif layer == "part":
            self._slice(what, "part", start, stop, {})
        else:
            self._slice(*_titled(what, self._row), start, stop, {})

    def _slice(self, name: str, category: str, start: float, stop: float, args: Mapping[str, str]) -> None:
        # Whole nanoseconds: a slice that ends with its outer one must not seem to end after it.
        start_ns, stop_ns = round(start * 1e9), round(stop * 1e9)
        event = {"ph": "X", "name": name, "cat": category, "ts": start_ns / 1e3, "dur": (stop_ns - start_ns) / 1e3}
        self._events.append(event | ({"args": dict(args)} if args else {}))


def _titled(instruction: Instruction, row: RowIdentity) -> tuple[str, str]:
    """Choose the name and category that the timeline shows for an instruction."""
    if isinstance(instruction, Action):
        return str(instruction), "action"
    return ", ".join(_transfer_name(transfer, row) for transfer in instruction.transfers), "transfer"


def _transfer_name(transfer: Transfer, row: RowIdentity) -> str:
    """Name a transfer by this rank's action, as in `send 0F3 to pp 1`."""
    letter, before = ("F", -1) if transfer.direction == "forward" else ("B", 1)
    if transfer.source == row.pp_rank:
        chunk = row.placement.chunk_of(transfer.stage + before)
        return f"send {chunk}{letter}{transfer.microbatch} to pp {transfer.destination}"
    chunk = row.placement.chunk_of(transfer.stage)
    return f"receive {chunk}{letter}{transfer.microbatch} from pp {transfer.source}"


@dataclass(frozen=True, slots=True)
class Merged:
    """The timeline file merged from the ranks' files.

    Attributes:
        path: merged file.
        num_ranks: number of ranks in the merged file.
        missing: ranks that wrote no file.
        error_seconds: largest clock error on any rank.
    """

    path: Path
    num_ranks: int
    missing: tuple[int, ...]
    error_seconds: float

    def __str__(self) -> str:
        text = (
            f"timeline of {self.num_ranks} ranks: {self.path} (open it in ui.perfetto.dev; clocks agree to "
            f"{self.error_seconds * 1e6:.0f} µs)"
        )
        if self.missing:
            text += f"; missing ranks: {', '.join(map(str, self.missing))}"
        return text


def merge(run: Path) -> Merged:
    """Merge the rank files from a run's latest traced attempt into its `timeline.json`.

    Raises:
        TriaxisError: no rank wrote a timeline, or a rank's file cannot be read.
        OSError: `timeline.json` cannot be written.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": run.name}}]
    contents = read_ranks(run)
    errors = [content["otherData"]["clock_error_seconds"] for content in contents.values()]
    world_size = [content["otherData"]["world_size"] for content in contents.values()][-1]
    for content in contents.values():
        events += content["traceEvents"]
    missing = tuple(rank for rank in range(world_size) if rank not in contents)
    merged = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"world_size": world_size, "clock_error_seconds": max(errors)},
    }
    path = run / "timeline.json"
    write_atomically(path, [json.dumps(merged).encode()])
    return Merged(path, len(contents), missing, max(errors))


def read_ranks(run: Path) -> dict[int, dict[str, Any]]:
    """Read the rank files from a run's latest traced attempt, by rank.

    The files have Chrome's trace format, with times in microseconds.

    Raises:
        TriaxisError: no rank wrote a timeline, or a rank's file cannot be read.
    """
    numbers = {int(match[1]): match[0] for entry in _names(run / "timeline") if (match := _ATTEMPT.fullmatch(entry))}
    folder = run / "timeline" / numbers[max(numbers)] if numbers else None
    files = [folder / name for name in _names(folder) if _RANK_FILE.fullmatch(name)] if folder is not None else []
    if not files:
        raise TriaxisError(
            f"{run} holds no rank's timeline (timeline/attempt_*/rank_*.json), so there is nothing to merge. Train with "
            "telemetry.timeline={start: 10, steps: 2}, and try again after those steps."
        )
    contents = {}
    for file in files:
        try:
            content = parse_json(read_regular(file, _MOST_BYTES))
            about = content["otherData"]
            about["clock_error_seconds"] = float(about["clock_error_seconds"])
            about["world_size"] = int(about["world_size"])
            content["traceEvents"] = list(content["traceEvents"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TriaxisError(
                f"{file} is not a rank's timeline ({type(error).__name__}: {error}). If it were ignored, its row would be missing "
                "unnoticed. Remove the file to leave the rank out."
            ) from error
        contents[int(file.stem.removeprefix("rank_"))] = content
    return contents


def _names(folder: Path) -> list[str]:
    """List the names in a folder, sorted. If there is no folder, the list is empty."""
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
