"""Records a job's attempts, and decides which nodes to exclude and when to give up.

`runs/<name>/slurm.json` has the attempts. A node that failed twice is excluded from the next attempt. An attempt that ends
without a newer checkpoint made no progress. After three such attempts in a row the job is not started again. An attempt without a
recorded end was ended from outside (a dead node, a preemption). It blames no node and is not one of the three.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path

from triaxis.engine.errors import TriaxisError
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.json_text import parse_json
from triaxis.engine.storage.redaction import without_secrets
from triaxis.engine.storage.state_files import read_regular

FAILURES_TO_EXCLUDE = 2
"""Failures after which a node is excluded; one failure may be an accident."""

ATTEMPTS_WITHOUT_PROGRESS = 3
"""Attempts in a row after which another one would only waste hours."""

HISTORY = "slurm.json"


class Outcome(Enum):
    """How an attempt ended."""

    FINISHED = "finished"
    PREEMPTED = "preempted"  # all ranks agreed, saved, and ended with the requeue code
    NEXT_PHASE = "next phase"  # a phase of the run has ended and is saved
    STOPPED = "stopped"  # stopped before it trained, or too late to save
    FAILED = "failed"  # a rank or a node died
    MISTAKE = "mistake"
    DIVERGED = "diverged"  # all ranks agreed that the numbers are wrong
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the ranks.

    Attributes:
        job: SLURM's job number.
        restart: number of earlier SLURM requeues.
        nodes: nodes of the attempt.
        began_unix_seconds: start time.
        from_step: step of the newest checkpoint at the start; 0: there was none.
        to_step: step of the newest checkpoint at the end.
        outcome: value of an `Outcome`; None while the attempt runs, or if it was ended from outside.
        blamed: nodes whose rank died first, or that were lost.
    """

    job: str
    restart: int
    nodes: tuple[str, ...]
    began_unix_seconds: float
    from_step: int
    to_step: int | None = None
    outcome: str | None = None
    blamed: tuple[str, ...] = ()

    @property
    def lacks_progress(self) -> bool:
        ended = (Outcome.FAILED.value, Outcome.PREEMPTED.value)
        return self.outcome in ended and (self.to_step or 0) <= self.from_step


class History:
    """The attempts of one run, in order.

    Args:
        run: run directory; created if missing.

    Raises:
        TriaxisError: the file is damaged.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / HISTORY
        self.attempts: list[Attempt] = []
        try:
            records = parse_json(read_regular(self._path))
            if not isinstance(records, list):
                raise ValueError("it holds no list of attempts")
            tuples = [{key: tuple(record[key]) for key in ("nodes", "blamed")} for record in records]
            self.attempts = [Attempt(**record | more) for record, more in zip(records, tuples, strict=True)]
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise TriaxisError(
                f"{self._path} is damaged ({error}). It records how this job's attempts ended, and on which nodes. "
                "Without it, a node that keeps failing would not be excluded. Restore it, or remove it to start "
                "counting anew."
            ) from None

    def begin(self, job: str, restart: int, nodes: Sequence[str], from_step: int) -> None:
        """Add an attempt that starts now, and write the file. `from_step` is the newest checkpoint's step, or 0."""
        self.attempts.append(Attempt(job, restart, tuple(nodes), time.time(), from_step))
        self._write()

    def end(self, outcome: Outcome, to_step: int, blamed: Sequence[str] = ()) -> None:
        """Add outcome, newest checkpoint's step and blamed nodes to the last attempt, and write the file."""
        self.attempts[-1] = replace(
            self.attempts[-1], outcome=outcome.value, to_step=to_step, blamed=tuple(sorted(blamed))
        )
        self._write()

    @property
    def excluded(self) -> list[str]:
        """Nodes blamed in at least `FAILURES_TO_EXCLUDE` attempts, sorted. The next attempt excludes them."""
        failures = Counter(node for attempt in self.attempts for node in attempt.blamed)
        return sorted(node for node, count in failures.items() if count >= FAILURES_TO_EXCLUDE)

    @property
    def without_progress(self) -> int:
        """Number of latest attempts in a row without progress.

        Such an attempt failed or was preempted, and saved no newer checkpoint. Stopped and unrecorded ends are skipped. Any other
        end breaks the row.
        """
        count = 0
        for attempt in reversed(self.attempts):
            if attempt.outcome in (None, Outcome.STOPPED.value):
                continue
            if not attempt.lacks_progress:
                break
            count += 1
        return count

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = without_secrets(json.dumps([asdict(attempt) for attempt in self.attempts], indent=2))
        write_atomically(self._path, [f"{text}\n".encode()])
