"""Waiting for a run that a fault has struck: the tools that all faults share.

alive, make_steps      the run goes on
plan, wait_for_act     a rank disturbs itself (`disturb.py`)
see_end                words, exit codes, processes that are left
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.soak.faults import Fault
from tests.soak.judge import Bound, Seen
from tests.soak.run import Run, Stuck, write_plan
from tests.soak.scene import ACTS, KILL_WAIT_SECONDS, LEAVING_SECONDS, PLAN, Settings

PATIENCE = 4
"""Bounds that the soak waits for before it ends what does not end: how much too late it is becomes a number."""


class Watcher:
    """Eyes on one run.

    Args:
        run: that is disturbed.
        settings: of the soak.
    """

    def __init__(self, run: Run, settings: Settings) -> None:
        self.run = run
        self._settings = settings

    def alive(self) -> bool:
        """Return True.

        Raises:
            Stuck: the run has ended.
        """
        if self.run.has_ended():
            raise Stuck(f"the run ended with {self.run.exit_codes()}, and no fault had asked it to")
        return True

    def make_steps(self, num_steps: int, what: str) -> None:
        """Wait until the run has made so many steps more; `what` they are, for the error."""
        due = self.run.last_step() + num_steps
        self.run.wait(lambda: self.alive() and self.run.last_step() >= due, self.patience(), what)

    def see_end(self, seen: Seen, bound: Bound, since: float, tells: Callable[[], bool]) -> None:
        """Wait for words and for the end of all launchers, then until no process is left."""
        run, told_after, ended_after = self.run, None, None
        while told_after is None or ended_after is None:
            now = time.time() - since
            run.read()
            if told_after is None and tells():
                told_after = now
            if run.has_ended():
                ended_after = now
                if told_after is None and tells():
                    told_after = now
                break
            if now > PATIENCE * bound.most:
                break
            time.sleep(0.05)
        seen.after = told_after if told_after is not None else time.time() - since
        seen.ended_after, seen.exit_codes = ended_after, tuple(run.exit_codes())
        deadline = time.monotonic() + LEAVING_SECONDS
        while (left := run.processes()) and ended_after is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        seen.left = [f"{process.name()} {process.pid}" for process in left]
        run.end()

    def patience(self) -> float:
        """Return the seconds after which the soak gives up waiting for a live run."""
        return PATIENCE * (self._settings.limits.end_seconds + KILL_WAIT_SECONDS)

    @contextmanager
    def plan(self, fault: Fault, **details: Any) -> Iterator[None]:
        """Let a rank disturb itself (`disturb.py`) while the block runs; `details` may name another rank than the fault's."""
        path = self.run.folder / PLAN
        write_plan(path, {"number": fault.number, "kind": fault.kind.value, "rank": fault.rank, **details})
        try:
            yield
        finally:
            write_plan(path, None)

    def wait_for_act(self, fault: Fault) -> Mapping[str, Any]:
        """Return what the rank has written about the plan that it carried out."""
        path = self.run.folder / ACTS

        def done() -> Mapping[str, Any] | None:
            lines = path.read_text().splitlines() if path.exists() else []
            return next((act for line in lines if (act := json.loads(line))["number"] == fault.number), None)

        return self.run.wait(done, self.patience(), f"rank {fault.rank} to do it to itself")


@contextmanager
def filling(disk: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that takes all the free room of a disk, also what was freed since its last call; the end frees it."""
    taken = disk / "filling"
    with taken.open("wb", buffering=0) as file:

        def fill() -> None:
            state = os.statvfs(disk)
            # A rank may write at the same moment.
            with suppress(OSError):
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), state.f_bavail * state.f_frsize)

        try:
            yield fill
        finally:
            taken.unlink()
