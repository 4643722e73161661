"""Chooses which of a schedule's two programs runs next, the early or the late one.

The early form posts receives ahead of need, the late form right before their use:

    run      1      2  3  4 ...     k          k+1 ... k+STEPS_AFTER_RETRY     ...
    form     late   early           (retry)    late                            early

In a first run, or when an allocator frees memory and retries, the host may wait for all work on its GPU. An early receive is such
work until its peer sends. If the peer's host waits in the same way, both ranks are stuck. Late receives cannot deadlock like this,
as `triaxis.engine.pipeline.validate` proves for each program.
"""

from collections.abc import Iterator

from triaxis.engine.config.rules.problem import Problem, Subject
from triaxis.engine.errors import ScheduleError
from triaxis.engine.pipeline.actions import Schedule
from triaxis.engine.pipeline.lowering import Program, lower
from triaxis.engine.pipeline.schedules import from_rows
from triaxis.engine.pipeline.validate import check

STEPS_AFTER_RETRY = 10
"""Runs with late receives after an allocator retry: memory that has run short is likely to run short again soon."""


class Programs:
    """The early and the late program for one schedule; each run executes one of them.

    All ranks make the same runs in the same order, and call `receive_late` before the same run.

    Args:
        schedule: every rank's complete compute actions.

    Attributes:
        early: program whose receives are posted before the action that precedes their consumer.
        late: program whose receives are posted right before their consumer.
        facts: what `check` counted in the early program: peak microbatches and receives, and transfers, per rank.

    Raises:
        ScheduleError: the schedule is incomplete, out of order, or one of its programs would deadlock.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.early, self.late = lower(schedule), lower(schedule, "late")
        self.facts = check(self.early)
        check(self.late)
        self._late_runs = 1

    def next(self) -> Program:
        """Return the program to run next. Each call uses up one run with late receives, so call this once per run."""
        if not self._late_runs:
            return self.early
        self._late_runs -= 1
        return self.late

    def receive_late(self, num_runs: int = STEPS_AFTER_RETRY) -> None:
        """Choose the late program (receives right before use) for at least the next `num_runs` runs."""
        self._late_runs = max(self._late_runs, num_runs)

    def receive_early(self) -> None:
        """Choose the early program (receives one action ahead) from the next run on, even for the first run."""
        self._late_runs = 0

    @property
    def is_late(self) -> bool:
        """Whether `next` will return the late program, which posts each receive right before its use."""
        return self._late_runs > 0


def schedule_file_runs(subject: Subject) -> Iterator[Problem]:
    """Yield a problem if the schedule in `schedule.file` is incomplete, out of order, or deadlocks.

    Other rules check for forward-only files and for a wrong number of rows. Only callers that start or check a run apply
    this rule.
    """
    file = subject.config.schedule.file
    # Other rules report a file that is not a training schedule, or has too few rows.
    if file is None or file.text.forward_only or len(file.text.rows) != file.text.pp:
        return
    schedule = from_rows(file.text)
    try:
        # Lowering takes a complete schedule for granted.
        check(schedule)
        Programs(schedule)
    except ScheduleError as error:
        yield subject.problem("schedule.file", f"cannot run: {str(error).rstrip('.')}", {"schedule.file": [None]})
