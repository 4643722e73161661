"""What has to come of each fault, and whether it did; facts against facts (no process, no file).

Fault, limits  ->  Expected   who and what must be named, exit codes, seconds, steps that may be lost
the run        ->  Seen       what was told where, and when; how it ended; what was left over
both           ->  problems   one sentence for each thing that is not as it must be; none: the verdict is "right"
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.soak.faults import Fault, Kind
from tests.soak.scene import (
    BACKGROUND_SAVE_STEPS,
    KILL_WAIT_SECONDS,
    LEAVING_SECONDS,
    LOG_INTERVAL,
    NUM_HOSTS,
    ROWS_PER_PAGE,
    SAMPLES_PER_STEP,
    SAVE_INTERVAL,
    Settings,
    address,
    host_of,
    replicas_of,
)
from triaxis.engine.checkpoint.writer import RETRY_PAUSES_SECONDS
from triaxis.engine.data.skipped import SkippedRanges
from triaxis.engine.errors import ExitCode
from triaxis.engine.resilience.hang.watch import SLOWER
from triaxis.engine.telemetry.timing.slow_ranks import IN_A_ROW

BROKE, REPLICAS_DIFFER, PREEMPTED, KILLED_RANK, KILLED = 1, 5, 75, 128 + 9, -9
"""How a launcher ends (docs/checkpoints.md, engine/errors.py); the last is that of one that was killed."""

_WAITS = re.compile(r"rank (\d+) \([^)]*\) waits .*?\branks? (\d+(?:, \d+)*)")
_BETWEEN = re.compile(r"is between node 0 \(ranks 0, 1\) and node 1 \(ranks 2, 3\)")


@dataclass(frozen=True, slots=True, order=True)
class Bound:
    """How long something may take, and where that comes from."""

    most: float
    unit: str
    reason: str

    def __str__(self) -> str:
        return f"{self.most:.1f} s" if self.unit == "s" else f"{self.most:.0f} {self.unit}"


@dataclass(frozen=True, slots=True)
class Expected:
    """What has to come of a fault.

    Attributes:
        ranks: that must be named, and no others; None: the fault has none.
        words: all of them must be in what was told.
        exit_codes: of the launchers by host; None: the run goes on.
        bound: from the fault to its naming, and where the run ends, to its end.
        most_lost: steps that may be made again.
    """

    ranks: frozenset[int] | None
    words: tuple[str, ...]
    exit_codes: tuple[int, ...] | None
    bound: Bound
    most_lost: int


@dataclass(slots=True)
class Seen:
    """What came of a fault.

    Attributes:
        step: the last that was written down before it; of one that belongs to a step, that step.
        source: where it was told; "": nowhere.
        told: the words.
        ranks: that they name.
        after: from the fault to these words, in the bound's unit.
        ended_after: to the end of the last launcher, in seconds; None: the run goes on.
        exit_codes: of the launchers by host; None: it ran still and was killed by the soak.
        lost: steps that were made again; None: nobody knows, since the run did not go on.
        left: processes that outlived their launchers.
        wrong: whatever else was not as it must be, found where only the kind knows to look.
    """

    step: int
    source: str = ""
    told: str = ""
    ranks: frozenset[int] | None = None
    after: float = 0.0
    ended_after: float | None = None
    exit_codes: tuple[int | None, ...] | None = None
    lost: int | None = 0
    left: Sequence[str] = ()
    wrong: list[str] = field(default_factory=list)


def most_lost(*, in_background: bool) -> int:
    """Steps that an attempt may lose: one interval, and those that were made while a save was being written."""
    return SAVE_INTERVAL + (BACKGROUND_SAVE_STEPS if in_background else 0)


def hang_bound(settings: Settings, slowest_seconds: float) -> Bound:
    """Return the bound on the end of a hang.

    Args:
        settings: of the soak.
        slowest_seconds: the longest time between two steps of the attempt, after its first two (docs/checkpoints.md, Hangs). No
            rank has stood still for longer, and a rank may stand still for twice as long as before.
    """
    slower_seconds = max(0.0, SLOWER * slowest_seconds - settings.hang_seconds)
    reason = "the end of a hang (docs/checkpoints.md), and leaving"
    return Bound(settings.limits.end_seconds + slower_seconds + LEAVING_SECONDS, "s", reason)


def expected_of(fault: Fault, settings: Settings, *, in_background: bool, slowest_seconds: float = 0.0) -> Expected:
    """What has to come of a fault in an attempt that saves in the background, or not; see `hang_bound` for `slowest_seconds`."""
    hang_seconds = settings.hang_seconds
    rank, host = frozenset({fault.rank}), host_of(fault.rank)
    lost = most_lost(in_background=in_background)
    hang = hang_bound(settings, slowest_seconds)

    def on_host(there: int, elsewhere: int) -> tuple[int, ...]:
        return tuple(there if each == host else elsewhere for each in range(NUM_HOSTS))

    match fault.kind:
        case Kind.KILL_RANK:
            words = (f"rank {fault.rank} ended with signal SIGKILL", f"[{address(host)}]")
            return Expected(rank, words, on_host(KILLED_RANK, BROKE), hang, lost)
        case Kind.KILL_NODE:
            return Expected(None, (f"[{address(host)}]",), on_host(KILLED, BROKE), hang, lost)
        case Kind.STOP_RANK:
            return Expected(rank, ("does not answer",), (ExitCode.HUNG,) * NUM_HOSTS, hang, lost)
        case Kind.CUT_LINK:
            return Expected(None, ("the run hangs",), (ExitCode.HUNG,) * NUM_HOSTS, hang, lost)
        case Kind.PREEMPT:
            bound = Bound(KILL_WAIT_SECONDS, "s", "SLURM's KillWait")
            words = (f"rank {fault.rank}: {fault.signal.name}", "preempted")
            return Expected(rank, words, (PREEMPTED,) * NUM_HOSTS, bound, 0)
        case Kind.FLIP_BIT:
            bound = Bound(2 * hang_seconds + LEAVING_SECONDS, "s", "two steps that do not hang, and leaving")
            codes = (REPLICAS_DIFFER,) * NUM_HOSTS
            return Expected(replicas_of(fault.rank), (fault.weight_name, "dp replicas"), codes, bound, lost)
        case Kind.NAN:
            bound = Bound(2 * hang_seconds, "s", "two steps that do not hang: its numbers are read a step later")
            place = f"the output of {fault.module_name} "
            return Expected(rank, (place, f"forward of microbatch {fault.microbatch} "), None, bound, lost)
        case Kind.SLOW_RANK:
            reports = IN_A_ROW + 2
            bound = Bound(
                reports * LOG_INTERVAL, "steps", f"{IN_A_ROW} reports, one under way, one reported a line later"
            )
            return Expected(rank, ("is slow",), None, bound, 0)
        case Kind.FULL_DISK:
            pauses = sum(RETRY_PAUSES_SECONDS)
            reason = f"{pauses:.0f} s of pauses before two more attempts to write, and a step that does not hang"
            bound = Bound(pauses + hang_seconds, "s", reason)
            return Expected(None, ("No space left on device", "rank "), None, bound, 0)
        case Kind.READER_ENDS:
            bound = Bound(KILL_WAIT_SECONDS, "s", "SLURM's KillWait, of the preemption that follows")
            return Expected(None, ("terminal", "Broken pipe"), (PREEMPTED,) * NUM_HOSTS, bound, 0)
        case Kind.PAUSED_TERMINAL:
            bound = Bound(hang_seconds, "s", "a step that does not hang, while the terminal is paused")
            return Expected(None, ("missing here", "the terminal was paused"), None, bound, 0)
        case Kind.FULL_LOG_DISK:
            bound = Bound(ROWS_PER_PAGE + 2, "steps", "rows that the last page of the file has room for, and two steps")
            words = (
                "metrics.jsonl cannot be written (No space left on device)",
                "metrics.jsonl is written again; nothing is",
            )
            return Expected(None, words, None, bound, 0)
        case Kind.STOP_IN_VALIDATION:
            bound = Bound(KILL_WAIT_SECONDS, "s", "SLURM's KillWait")
            words = (f"rank {fault.rank}: {fault.signal.name}", "preempted")
            return Expected(rank, words, (PREEMPTED,) * NUM_HOSTS, bound, 0)
        case Kind.REMOVED_RUN_DIR:
            bound = Bound(KILL_WAIT_SECONDS, "s", "SLURM's KillWait, of the preemption that follows")
            return Expected(None, ("were removed", "training goes on"), (PREEMPTED,) * NUM_HOSTS, bound, 0)


def problems(expected: Expected, seen: Seen) -> list[str]:
    """What is not as it must be; []: the run did what it promises."""
    found = []
    if not seen.source:
        found.append("it was not reported")
    else:
        if seen.ranks != expected.ranks:
            found.append(f"{_ranks(seen.ranks)} named, not {_ranks(expected.ranks)}")
        found += [f"not reported: {words!r}" for words in expected.words if words not in seen.told]
        if seen.after > expected.bound.most:
            found.append(f"reported after {seen.after:.1f} {expected.bound.unit}, the bound is {expected.bound}")
    if seen.exit_codes != expected.exit_codes:
        found.append(f"exit codes {_codes(seen.exit_codes)}, not {_codes(expected.exit_codes)}")
    if expected.exit_codes is not None:
        if seen.ended_after is None:
            found.append("it did not end")
        elif seen.ended_after > expected.bound.most:
            found.append(f"ended after {seen.ended_after:.1f} s, the bound is {expected.bound}")
    if seen.lost is None:
        found.append("it did not go on afterwards")
    elif seen.lost > expected.most_lost:
        found.append(f"{seen.lost} steps lost, at most {expected.most_lost} may be")
    elif seen.lost < 0:
        found.append(f"it went on {-seen.lost} steps after the last one that was written down")
    if seen.left:
        found.append(f"left over: {', '.join(seen.left)}")
    return found + seen.wrong


def names_the_link(report: str) -> bool:
    """Whether a hang report says of a rank that it waits for one of another host, or which hosts a call that does not end joins."""
    return any(host_of(one) != host_of(other) for one, other in _waits(report)) or _BETWEEN.search(report) is not None


def names_as_awaited(rank: int, report: str) -> bool:
    """Return True if a hang report has another rank that waits for this one."""
    return any(other == rank for _, other in _waits(report))


def _waits(report: str) -> list[tuple[int, int]]:
    """Return all pairs (rank that waits, rank that it waits for) of a hang report."""
    return [(int(one), int(other)) for one, several in _WAITS.findall(report) for other in several.split(", ")]


def step_of(sample: int, skipped: SkippedRanges) -> int:
    """The step, from 1, that a sample is in, while these are left out."""
    return (sample - sum(stop - start for start, stop in skipped.ranges if stop <= sample)) // SAMPLES_PER_STEP + 1


def _ranks(ranks: frozenset[int] | None) -> str:
    return "no ranks" if ranks is None else f"ranks {sorted(ranks)}"


def _codes(codes: tuple[int | None, ...] | None) -> str:
    if codes is None:
        return "none (it goes on)"
    return " ".join("none (killed by the soak)" if code is None else str(code) for code in codes)
