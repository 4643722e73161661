"""Detects a hang, reports it, and ends the job with an exit code for hangs.

    each rank     a thread finds that the rank's heartbeat has not changed for longer than `StillLimit` allows
    status        the thread writes the rank's activity to RUN_DIR/hangs/attempt_00/rank_00003.answers.json, and waits for the
                  other ranks' files for at most a grace period
    deputy        the lowest rank on each node that wrote a status; it writes the statuses of the node's silent ranks
    reporter      the lowest rank that wrote a status; it writes the report (`report.py`) to report.json, events and its own output
    end           deputies kill their nodes' silent ranks with SIGKILL; all other ranks exit with `ExitCode.HUNG`

If a rank has written a status, every other rank that stands still writes its own at once. A rank that resumes was only slow, and
deletes its status. While a rank's loader builds an epoch's sample order, each finished piece counts as movement. If other
ranks report a hang meanwhile, the building rank writes `rank_00003.busy`, and the other ranks delete their statuses.

The threads need only the run directory, so they detect hangs even while the main thread is blocked in a collective.

On GPUs, a rank's host runs ahead of its device, so the recorded waits are the host's. The device's last calls are in NCCL's flight
record, which is written next to the status.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.errors import ExitCode
from triaxis.engine.resilience.hang.heartbeat import Beat, Heartbeat, started_at
from triaxis.engine.resilience.hang.report import HangReport, RankStatus, RunLayout
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.redaction import without_secrets
from triaxis.engine.storage.state_files import read_object

REPORT = "report.json"
ANSWERS, SILENT = "answers", "silent"
"""Kinds of status file: written by the rank itself, or by its deputy."""

BUSY = "busy"
"""Suffix of the file that a rank writes if it builds an epoch's order while others report a hang."""

_RANK_FILE = re.compile(r"rank_(?P<rank>[0-9]{5,9})\.\w+\.json")

_FIRST_STEP = 0.9
"""Limit in an attempt's first steps, as a fraction of `runtime.timeout_seconds`, after which a collective fails."""

_FIRST_STEPS = 2
"""Number of steps with this limit. In its second step, a rank waits for the first step's numbers, and so for all that the device
does for the first time.
"""

SLOWER = 2.0
"""A pause may be this many times as long as the longest earlier one."""

_LOOKS_PER_LIMIT = 10
_LONGEST_LOOK_SECONDS = 5.0
_LONGEST_GRACE_SECONDS = 60.0
_SHORTEST_GRACE_SECONDS = 1.0
_POLL_SECONDS = 0.1
_POLL_SECONDS_PER_RANK = 0.002
"""Poll interval per rank: a thousand ranks that list a folder ten times a second would overload its file system."""


@dataclass(frozen=True, slots=True)
class HangLimits:
    """Time limits for detecting and reporting a hang.

    Attributes:
        still_seconds: time for which a rank may stand still.
        first_seconds: the same limit in an attempt's first two steps, which load kernels and open connections.
        look_seconds: time between two looks at a heartbeat.
        grace_seconds: longest time to wait for the others' statuses. The wait for the report takes at most twice as long.
    """

    still_seconds: float
    first_seconds: float
    look_seconds: float
    grace_seconds: float

    @classmethod
    def after(cls, still_seconds: float, timeout_seconds: float) -> "HangLimits":
        """Derive the limits from `runtime.hang_seconds` and `runtime.timeout_seconds`."""
        look = min(still_seconds / _LOOKS_PER_LIMIT, _LONGEST_LOOK_SECONDS)
        # Ranks come to a stop one after the other, up to a step apart.
        grace = min(max(still_seconds / 4, _SHORTEST_GRACE_SECONDS), _LONGEST_GRACE_SECONDS) + 2 * look
        return cls(still_seconds, max(still_seconds, _FIRST_STEP * timeout_seconds), look, grace)

    @property
    def end_seconds(self) -> float:
        """Longest time from the moment when no rank moves to the exit of all ranks, except in the attempt's first steps."""
        return self.still_seconds + 2 * self.look_seconds + 3 * self.grace_seconds


class StillLimit:
    """Limit on how long this rank may stand still, which grows with its earlier pauses.

    So a run whose steps are longer than `runtime.hang_seconds` does not count as hanging. From the third step on, the limit is at
    least `SLOWER` times the longest earlier pause. From the fourth step on, pauses in the first two steps are left out.
    """

    def __init__(self, limits: HangLimits) -> None:
        self._limits = limits
        self._first_seconds = 0.0
        self._later_seconds = 0.0

    def seconds(self, begun: int) -> float:
        """Limit in seconds for a pause in this process's step number `begun`, counted from 1."""
        if begun <= _FIRST_STEPS:
            return self._limits.first_seconds
        slowest = self._later_seconds
        if begun == _FIRST_STEPS + 1:
            slowest = max(slowest, self._first_seconds)
        return max(self._limits.still_seconds, SLOWER * slowest)

    def went_on(self, begun: int, still_seconds: float) -> None:
        """Record that the rank stood still for `still_seconds` in step `begun`, and then moved again by itself."""
        if begun <= _FIRST_STEPS:
            self._first_seconds = max(self._first_seconds, still_seconds)
        else:
            self._later_seconds = max(self._later_seconds, still_seconds)


@dataclass(eq=False)
class HangWatch:
    """One rank's thread that detects a hang, started by `start`.

    Attributes:
        folder: RUN_DIR/hangs/attempt_<n>, the same on all nodes.
        limits: limits on standing still and on reporting, and the time between two looks.
        announce: function (step, report's text) that the reporter calls before it ends the process.
        write_flight_record: function (file) that writes the backend's record of this rank's last calls, if it keeps a record.
        leave: function (exit code) that ends this process.
        where: function (rank, process id) -> host, process and GPU of a rank on this node.
        next_action: function () -> clause for the report: what the next start of the command does.
    """

    heartbeat: Heartbeat
    layout: RunLayout
    folder: Path
    limits: HangLimits
    announce: Callable[[int, str], None]
    write_flight_record: Callable[[Path], None] = lambda path: None
    leave: Callable[[int], None] = os._exit
    where: Callable[[int, int], str] = lambda rank, pid: ""
    next_action: Callable[[], str] = lambda: "the same command goes on from the newest checkpoint"

    def __post_init__(self) -> None:
        self._rank = self.heartbeat.read().rank
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)

    def start(self) -> None:
        """Start the thread, which runs until `close`, or until it ends this process after a hang."""
        self._thread.start()

    def close(self) -> None:
        """Stop the watch, because training is over."""
        self._over.set()
        self._thread.join(self.limits.look_seconds)

    def _watch(self) -> None:
        limits, last, still_seconds = self.limits, self.heartbeat.read(), 0.0
        still_limit = StillLimit(limits)
        while True:
            before = time.monotonic()
            if self._over.wait(limits.look_seconds):
                return
            beat = self.heartbeat.read()
            limit_seconds = still_limit.seconds(beat.begun)
            if beat.building and still_seconds < limit_seconds and self._ranks(ANSWERS):
                self._say_busy()
            if not last.is_still(beat):
                still_limit.went_on(last.begun, still_seconds)
                last, still_seconds = beat, 0.0
                continue
            # A process that was stopped and goes on has not stood still for all that time.
            still_seconds += min(time.monotonic() - before, 2 * limits.look_seconds)
            is_late = still_seconds >= limit_seconds and may_hang(beat)
            # If others hang, a rank that does not move reports at once: they may wait for it.
            if is_late or (not beat.building and self._ranks(ANSWERS)):
                try:
                    self._hangs(beat, still_seconds)
                except OSError as error:
                    print(
                        f"rank {self._rank}: the run hangs, and nothing can be written down: {error}", file=sys.stderr
                    )
                    self.leave(ExitCode.HUNG)
                # The rank resumed after all.
                still_limit.went_on(beat.begun, still_seconds)
                last, still_seconds = self.heartbeat.read(), 0.0

    def _hangs(self, beat: Beat, still_seconds: float) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        own = self._path(self._rank, ANSWERS)
        write_status(own, RankStatus(self._rank, beat, True, still_seconds, self.where(self._rank, beat.pid)))
        said_at = own.stat().st_mtime_ns
        # In a thread of its own: it asks the backend, which is what hangs.
        path = self.folder / f"rank_{self._rank:05d}.nccl.json"
        threading.Thread(target=self.write_flight_record, args=(path,), name="flight-record", daemon=True).start()
        grid = self.layout.grid
        node = grid.node(self._rank)
        neighbours = [rank for rank in range(grid.world_size) if grid.node(rank) == node]

        def all_answer() -> bool:
            if self._busy_since(said_at):
                return True
            # One rank per node lists the folder; the others wait for the report.
            if any(self._path(rank, ANSWERS).exists() for rank in neighbours if rank < self._rank):
                return (self.folder / REPORT).exists()
            return len(self._ranks(ANSWERS)) == grid.world_size

        if not self._wait_for(all_answer, unless_goes_on=beat):
            own.unlink(missing_ok=True)
            print(f"rank {self._rank}: went on after standing still for {still_seconds:.0f} seconds", file=sys.stderr)
            return
        if self._busy_since(said_at):
            own.unlink(missing_ok=True)
            print(f"rank {self._rank}: waits for a rank that builds the order of an epoch", file=sys.stderr)
            return
        answered = sorted({*self._ranks(ANSWERS), self._rank})
        silent = [rank for rank in neighbours if rank not in answered]
        is_deputy = self._rank == next(rank for rank in answered if rank in neighbours)
        if is_deputy:
            for rank in silent:
                last = self.heartbeat.of_rank(rank, beat.attempt)
                where = "" if last is None else self.where(rank, last.pid)
                write_status(self._path(rank, SILENT), RankStatus(rank, last, False, where=where))
        if self._rank == answered[0]:
            self._report()
        # The reporter may have waited for other nodes first.
        self._wait_for((self.folder / REPORT).exists, graces=2)
        if is_deputy:
            for rank in silent:
                self._kill(self.heartbeat.of_rank(rank, beat.attempt))
        self.heartbeat.close()
        sys.stdout.flush()
        sys.stderr.flush()
        self.leave(ExitCode.HUNG)

    def _report(self) -> None:
        num_ranks = self.layout.grid.world_size
        # Deputies on other nodes write at the same time as this one.
        self._wait_for(lambda: len({*self._ranks(ANSWERS), *self._ranks(SILENT)}) == num_ranks)
        statuses = []
        for rank in range(num_ranks):
            found = read_status(self._path(rank, ANSWERS)) or read_status(self._path(rank, SILENT))
            statuses.append(found or RankStatus(rank, None, False))
        report = HangReport(self.layout, statuses)
        text = f"{report.text()}\n  what each rank was doing: {self.folder}\n  next: {self.next_action()}"
        with suppress(OSError):
            self.announce(report.step, text)
        record = {"reporter": self._rank, "step": report.step, "culprits": report.culprits, "text": text}
        write_atomically(self.folder / REPORT, [(without_secrets(json.dumps(record, indent=2)) + "\n").encode()])

    def _wait_for(self, is_done: Callable[[], bool], *, graces: int = 1, unless_goes_on: Beat | None = None) -> bool:
        """Wait until `is_done()`, at most for `graces` grace periods.

        Returns:
            False if this rank moved on from its heartbeat `unless_goes_on` during the wait. True if `is_done()` or time ran out.
        """
        deadline = time.monotonic() + graces * self.limits.grace_seconds
        poll_seconds = max(_POLL_SECONDS, _POLL_SECONDS_PER_RANK * self.layout.grid.world_size)
        while time.monotonic() < deadline and not is_done():
            if unless_goes_on is not None and not self.heartbeat.read().is_still(unless_goes_on):
                return False
            time.sleep(poll_seconds)
        return True

    def _ranks(self, kind: str) -> list[int]:
        """List the ranks with a status file of this kind, without opening a file."""
        found = (_RANK_FILE.fullmatch(path.name) for path in self.folder.glob(f"rank_*.{kind}.json"))
        return [int(match["rank"]) for match in found if match is not None]

    def _say_busy(self) -> None:
        """Tell waiting ranks, by a file, that this rank builds an epoch's sample order."""
        with suppress(OSError):
            write_atomically(self.folder / f"rank_{self._rank:05d}.{BUSY}", [b""])

    def _busy_since(self, time_ns: int) -> bool:
        """Whether a rank has written its busy file at or after `time_ns`.

        `time_ns` is on the clock of the folder's file system.
        """
        for path in self.folder.glob(f"rank_*.{BUSY}"):
            with suppress(OSError):
                if path.stat().st_mtime_ns >= time_ns:
                    return True
        return False

    def _path(self, rank: int, kind: str) -> Path:
        return self.folder / f"rank_{rank:05d}.{kind}.json"

    def _kill(self, beat: Beat | None) -> None:
        if beat is None:
            return
        # The pid alone may belong to another process by now, or to one in another container.
        if beat.started == started_at(beat.pid):
            with suppress(OSError):
                os.kill(beat.pid, signal.SIGKILL)
        self.heartbeat.remove(beat.rank)


def may_hang(beat: Beat) -> bool:
    """Whether a rank that does not move may hang.

    False before its first step, and while it writes a checkpoint without waiting for another rank.
    """
    return bool(beat.part) and (beat.part != StepPart.CHECKPOINT or bool(beat.op))


def write_status(path: Path, status: RankStatus) -> None:
    """Write a rank's status as JSON, either completely or not at all."""
    write_atomically(path, [(without_secrets(json.dumps(asdict(status))) + "\n").encode()])


def read_status(path: Path) -> RankStatus | None:
    """Read a status that `write_status` wrote, or return None if the file has none."""
    try:
        record = read_object(path)
        if record is None:
            return None
        beat = record["beat"]
        return RankStatus(
            record["rank"],
            None if beat is None else Beat(**beat),
            record["answers"],
            record["still_seconds"],
            record["where"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def hang_report(folder: Path) -> Mapping[str, Any] | None:
    """Read the hang report in `folder`, RUN_DIR/hangs/attempt_<n>. None if report.json is missing or invalid."""
    try:
        report = read_object(folder / REPORT)
    except (OSError, ValueError):
        return None
    is_ours = report is not None and isinstance(report.get("reporter"), int) and isinstance(report.get("text"), str)
    return report if is_ours else None
