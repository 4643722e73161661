"""Preemptions: a signal to one rank, at any moment or during a validation. The run saves and ends, and loses no step."""

import re
import time
from collections.abc import Callable

from tests.soak.faults import Fault
from tests.soak.judge import Expected, Seen
from tests.soak.scene import EVAL_INTERVAL
from tests.soak.watcher import Watcher


def preempt(watcher: Watcher, fault: Fault, expected: Expected, seen: Seen) -> None:
    """Send a signal to a rank and see the run end."""
    since = time.time()
    watcher.run.rank(fault.rank).send_signal(fault.signal)
    watcher.see_end(seen, expected.bound, since, _names_signal(watcher, fault, seen))


def stop_in_validation(watcher: Watcher, fault: Fault, expected: Expected, seen: Seen) -> None:
    """Let a rank send itself a signal in the next validation, and see the run end without that validation's loss."""
    run = watcher.run
    with watcher.plan(fault, signal=int(fault.signal)):
        act = watcher.wait_for_act(fault)
    since = act["unix_time_seconds"]
    watcher.see_end(seen, expected.bound, since, _names_signal(watcher, fault, seen))
    run.read()
    seen.step = run.last_step()
    if seen.step % EVAL_INTERVAL:
        seen.wrong.append(f"the run ended after step {seen.step}, which no validation follows")
    if list(run.of_kind("validation", since)):
        seen.wrong.append("the validation was made to its end")


def check_repeated_validation(watcher: Watcher, seen: Seen) -> None:
    """Check that the attempt after `stop_in_validation` has made the validation that was broken off, once and first."""
    run = watcher.run
    made = [event["step"] for event in run.of_kind("validation")]
    if made.count(seen.step) != 1 or made[0] != seen.step:
        seen.wrong.append(
            f"the next attempt made the validations of steps {made}, not first and once that of {seen.step}"
        )


def _names_signal(watcher: Watcher, fault: Fault, seen: Seen) -> Callable[[], bool]:
    run = watcher.run

    def tells() -> bool:
        stopped = list(run.of_kind("stopped"))
        seen.told = run.rank_log(fault.rank) + "".join(f"\n{event['reason']}" for event in stopped)
        named = re.findall(r"rank (\d+): SIG[A-Z0-9]+: all ranks finish", seen.told)
        seen.ranks = frozenset(map(int, named)) or None
        seen.source = "event stopped" if stopped else ""
        return bool(seen.source and named)

    return tells
