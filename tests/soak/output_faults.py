"""Faults of the places that a run writes to: its terminal ends or is paused, its directory has no room or is removed.

None of them may hold the run. What the terminal or the disk did not take is counted, or written when there is room again.
"""

import re
import signal
import time
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from tests.log_lines import without_times
from tests.soak.faults import Fault
from tests.soak.judge import Expected, Seen
from tests.soak.scene import LOG_INTERVAL, Settings
from tests.soak.watcher import Watcher, filling
from triaxis.launch.rank.directory_watch import LOOK_SECONDS

_STEPS_WITHOUT_OUTPUT = 2 * LOG_INTERVAL

_LOG_LAG_SECONDS = 0.2
"""A line of the log is on the terminal some milliseconds later, because a thread writes there."""

LOST_LINES = re.compile(r"\[(\d+) lines? (?:is|are) missing here: the terminal was paused[^]]*\]")
_PRINTED_STEP = re.compile(r"^ *([\d,]+)/[\d,]+ ", re.MULTILINE)


def reader_ends(watcher: Watcher, expected: Expected, seen: Seen) -> None:
    """End the reader of the terminal; the run goes on until it is preempted, because later faults need their launcher's words."""
    run, since = watcher.run, time.time()
    run.launchers[0].reader.kill()
    dropped = run.wait(
        lambda: watcher.alive() and list(run.of_kind("output_dropped", since)), watcher.patience(), "an event"
    )
    seen.source, seen.told = "event output_dropped", dropped[0]["message"]
    after = dropped[0]["unix_time_seconds"] - since
    watcher.make_steps(LOG_INTERVAL, "steps without a terminal")
    _end(watcher, expected, seen, after)
    if len(list(run.of_kind("output_dropped", since))) > 1:
        seen.wrong.append("the terminal is dropped more than once")


def pause_terminal(watcher: Watcher, fault: Fault, seen: Seen) -> None:
    """Stop the reader of the terminal while rank 0 prints more than may wait for it, and let it read on some steps later."""
    run, launcher = watcher.run, watcher.run.launchers[0]
    shown = len(launcher.words)
    launcher.reader.send_signal(signal.SIGSTOP)
    time.sleep(_LOG_LAG_SECONDS)
    logged = len(run.rank_log(0))
    try:
        with watcher.plan(fault, rank=0):
            since = watcher.wait_for_act(fault)["unix_time_seconds"]
        watcher.make_steps(_STEPS_WITHOUT_OUTPUT, "steps while the terminal is paused")
    finally:
        launcher.reader.send_signal(signal.SIGCONT)
    times = [since, *(row["unix_time_seconds"] for row in run.rows() if row["unix_time_seconds"] >= since)]
    seen.after = max(later - earlier for earlier, later in pairwise(times))

    def is_counted() -> bool:
        watcher.alive()
        words = launcher.words[shown:]
        counts = LOST_LINES.findall(words)
        if not counts:
            return False
        seen.source, seen.told = "the terminal", "\n".join(match[0] for match in LOST_LINES.finditer(words))
        lost = Counter(without_times(run.rank_log(0)[logged:]).splitlines()) - Counter(words.splitlines())
        return lost.total() == sum(map(int, counts))

    run.wait(is_counted, watcher.patience(), "the terminal to count the lines of the log that it lacks")


def fill_log_disk(watcher: Watcher, seen: Seen) -> None:
    """Fill the disk of the run directory for some steps; the terminal shows that the run goes on, and no row is lost."""
    run, since = watcher.run, time.time()
    terminal, before, first = run.launchers[0], len(run.steps), run.last_step()
    shown = len(terminal.words)
    with filling(run.path.parent) as fill:

        def printed_step(least: int) -> int:
            watcher.alive()
            fill()
            words = terminal.words[shown:]
            printed = [int(step.replace(",", "")) for step in _PRINTED_STEP.findall(words)]
            is_noticed = "metrics.jsonl cannot be written" in words
            return printed[-1] if is_noticed and printed and printed[-1] >= least else 0

        noticed = run.wait(lambda: printed_step(1), watcher.patience(), "the terminal to name the file without room")
        due = noticed + _STEPS_WITHOUT_OUTPUT
        printed = run.wait(lambda: printed_step(due), watcher.patience(), "steps while the disk is full")
        written = run.last_step()
    resumed = run.wait(
        lambda: watcher.alive() and _of_metrics(watcher, "output_resumed", since),
        watcher.patience(),
        "the rows to go on",
    )
    watcher.make_steps(LOG_INTERVAL, "steps after there is room again")
    stopped = _of_metrics(watcher, "output_stopped", since)
    seen.source, seen.told = "event output_stopped", "\n".join(event["message"] for event in [*stopped, *resumed])
    rows = run.steps[before:]
    if len(stopped) == len(resumed) == 1:
        seen.after = sum(row["unix_time_seconds"] <= stopped[0]["unix_time_seconds"] for row in rows)
    else:
        seen.wrong.append(f"events report {len(stopped)} stops and {len(resumed)} resumptions of metrics.jsonl")
    if written >= printed:
        seen.wrong.append(f"the row of step {written} was written to a full disk")
    steps = [row["step"] for row in rows]
    if steps != list(range(first + 1, first + 1 + len(steps))):
        seen.wrong.append(f"metrics.jsonl has the steps {steps} after step {first}")


def _of_metrics(watcher: Watcher, kind: str, since: float) -> list[Mapping[str, Any]]:
    return [event for event in watcher.run.of_kind(kind, since) if event["output"] == "metrics.jsonl"]


def remove_run_directory(watcher: Watcher, settings: Settings, expected: Expected, seen: Seen) -> None:
    """Remove the run directory; the run makes it again, goes on, and the attempt after a preemption counts on and resumes."""
    run, since = watcher.run, time.time()
    before = len(run.steps)
    run.remove_directory()
    told = run.wait(
        lambda: watcher.alive() and list(run.of_kind("directory_put_back", since)), watcher.patience(), "an event"
    )
    seen.source, seen.told = "event directory_put_back", told[0]["message"]
    after = told[0]["unix_time_seconds"] - since
    # The run looks once a second, at the end of a phase.
    if after > LOOK_SECONDS + settings.hang_seconds:
        seen.wrong.append(f"noticed after {after:.1f} s")
    watcher.make_steps(LOG_INTERVAL, "steps in the new directory")
    _end(watcher, expected, seen, after)
    steps = [row["step"] for row in run.steps[before:]]
    if not steps or steps != list(range(steps[0], steps[0] + len(steps))):
        seen.wrong.append(f"the new metrics.jsonl has the steps {steps}")
    if len(list(run.of_kind("directory_put_back", since))) > 1:
        seen.wrong.append("the removal is reported more than once")


def _end(watcher: Watcher, expected: Expected, seen: Seen, after: float) -> None:
    """Preempt a run whose fault was noticed `after` seconds, and see it end."""
    since = time.time()
    watcher.run.rank(0).send_signal(signal.SIGTERM)
    watcher.see_end(seen, expected.bound, since, lambda: bool(list(watcher.run.of_kind("stopped"))))
    seen.after = after
