"""The errors of Triaxis (no torch here).

Each message has four parts: the given value, the rule, what would have broken, what to do. `exit_code` separates a user's mistake
(2), a broken machine (5) and wrong numbers (6) from a broken run (1), so that a batch script can decide whether to try again.
"""

from collections.abc import Sequence
from itertools import islice

_SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """Return a value from a foreign file in at most about 80 characters, for a message.

    `repr` alone would fail for an integer of 10,000 digits, and a list may contain itself a million times over.
    """
    if isinstance(value, str):
        return (
            repr(value)
            if len(value) <= _SHOWN_CHARACTERS
            else f"{value[:_SHOWN_CHARACTERS]!r}.. ({len(value):,} characters)"
        )
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length():,} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        nested = (list, tuple, dict)
        items = [f"a {type(item).__name__}" if isinstance(item, nested) else shown(item) for item in islice(value, 3)]
        text = ", ".join([*items, ".."] if len(value) > 3 else items)
        return f"[{text}]" if isinstance(value, list) else f"({text})"
    return f"a {type(value).__name__}"


class TriaxisError(Exception):
    """The base of all errors meant for users; printed without a traceback."""

    exit_code = 2


class ConfigError(TriaxisError):
    """Problems of a configuration, one or more at once: `problems` holds a readable line or paragraph for each."""

    def __init__(self, problems: Sequence[str], source: str = "the configuration") -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        body = "\n".join(f"  {number}. {text}" for number, text in enumerate(self.problems, start=1))
        super().__init__(f"{source} has {count}:\n{body}")


class TopologyError(TriaxisError):
    """Ranks, nodes or groups that do not exist or do not fit."""


class PortTakenError(TopologyError):
    """A rendezvous port in use; later, or at another port, the ranks can meet."""

    exit_code = 1


class ScheduleError(TriaxisError):
    """A pipeline schedule that is incomplete, out of order, or would deadlock."""


class DataError(TriaxisError):
    """A corpus, an index or a tokenizer that is missing, truncated or not what it claims to be."""


class CheckpointError(TriaxisError):
    """A checkpoint that is missing, incomplete, damaged or of another model."""


class SaveError(CheckpointError):
    """A failed last checkpoint; with room on the disk the same command resumes from the one before."""

    exit_code = 1


class StorageError(TriaxisError):
    """A folder of the run that cannot be used: owned by another user, read-only, or below a file.

    Args:
        text: the message.
        is_passing: a later start may succeed (a full disk, a server that does not answer); then the exit code is 1.
    """

    def __init__(self, text: str, *, is_passing: bool = False) -> None:
        self.exit_code = 1 if is_passing else 2
        super().__init__(text)


class OutputError(TriaxisError):
    """Standard output that cannot be written; with room on its disk the same command succeeds."""

    exit_code = 1


class OutOfMemoryError(TriaxisError):
    """A rank out of memory; the same configuration would fail again."""


class NoRoomError(TriaxisError):
    """A node without room for a small file of a rank; with room, or on another node, the same command runs."""

    exit_code = 1


class ReplicaError(TriaxisError):
    """Replicated weights that differ between ranks: memory, a link or a kernel has failed."""

    exit_code = 5


class DivergenceError(TriaxisError):
    """A loss or gradients that are not finite, or a loss that jumps, with no policy left: a repetition would give the same.

    Raised on every rank after the same step.
    """

    exit_code = 6
