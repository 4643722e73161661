"""The errors of Triaxis (no torch here).

Each message says four things: what was given, the rule, what would have broken, what to do. `exit_code` tells a user's
mistake (2), a machine that broke (5) and numbers that went wrong (6) from a run that broke (1), so that a batch script can decide
whether trying again makes sense.
"""

from collections.abc import Sequence
from itertools import islice

_SHOWN_CHARACTERS = 60


def shown(value: object) -> str:
    """Return a value from a foreign file in at most about 80 characters, for a message.

    `repr` alone would not do: it fails for an integer of 10,000 digits, and a list may contain itself a million times over.
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
    """Base of all errors that are meant to be read by a user; printed without a traceback."""

    exit_code = 2


class ConfigError(TriaxisError):
    """One or more problems in a configuration, all reported at once.

    `problems` holds one readable line (or a short paragraph) per problem.
    """

    def __init__(self, problems: Sequence[str], source: str = "the configuration") -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        body = "\n".join(f"  {number}. {text}" for number, text in enumerate(self.problems, start=1))
        super().__init__(f"{source} has {count}:\n{body}")


class TopologyError(TriaxisError):
    """The ranks, nodes or groups that were asked for do not exist or do not fit."""


class PortTakenError(TopologyError):
    """Somebody else listens where the ranks were to meet; later, or at another port, they can."""

    exit_code = 1


class ScheduleError(TriaxisError):
    """A pipeline schedule that is incomplete, out of order, or would deadlock."""


class DataError(TriaxisError):
    """A corpus, an index or a tokenizer that is missing, truncated or not what it claims to be."""


class CheckpointError(TriaxisError):
    """A checkpoint that is missing, incomplete, damaged or of another model."""


class SaveError(CheckpointError):
    """The last checkpoint of a run could not be written; with room on the disk the same command goes on from the one before."""

    exit_code = 1


class StorageError(TriaxisError):
    """A folder of the run that cannot be used: it is of another user, read-only, or below a file.

    Args:
        text: the message.
        is_passing: the next start may go better: the disk is full, or its server does not answer. Then the exit code is 1.
    """

    def __init__(self, text: str, *, is_passing: bool = False) -> None:
        self.exit_code = 1 if is_passing else 2
        super().__init__(text)


class OutputError(TriaxisError):
    """Standard output cannot be written; with room on its disk the same command succeeds."""

    exit_code = 1


class OutOfMemoryError(TriaxisError):
    """A rank asked for more memory than there is; the same configuration would do so again."""


class NoRoomError(TriaxisError):
    """A node has no room for a small file that a rank needs; with room, or on another node, the same command runs."""

    exit_code = 1


class ReplicaError(TriaxisError):
    """Ranks that must hold the same weights do not: memory, a link or a kernel has failed."""

    exit_code = 5


class DivergenceError(TriaxisError):
    """Loss or gradients are not finite, or the loss jumps, and no policy is left: the same steps would give the same numbers.

    Raised on every rank after the same step.
    """

    exit_code = 6
