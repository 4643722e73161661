"""Defines the errors of Triaxis and their exit codes.

Each message has four parts: the given value, the rule, what would have broken, what to do. The exit code shows a batch script
whether trying again makes sense.
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import islice

_SHOWN_CHARACTERS = 60

LONGEST_SHOWN = 200
"""Maximum number of characters that a message repeats from a name or an override."""


class ExitCode(IntEnum):
    """The exit codes of Triaxis processes, besides 0 and 128 + n.

    0 means success: a training run has completed its last step, now or earlier. 128 + n means that signal n ended the process.
    """

    BROKE = 1
    """Something broke: starting again resumes from the newest checkpoint."""
    MISTAKE = 2
    """A mistake in a command or configuration: starting again would end the same way."""
    OUT_OF_LINE = 3
    """`triaxis doctor` found a node that fails a check, or differs too much from the others."""
    HUNG = 4
    """The run hung: the report shows which rank waits for which; starting again resumes from the newest checkpoint."""
    REPLICAS_DIFFER = 5
    """Ranks that must hold the same weights do not: a machine is faulty, and a new start on the same nodes may end the same way."""
    DIVERGED = 6
    """The loss or gradients were not finite, or the loss jumped: starting again would end the same way.

    No rank has failed: all ranks end with this code after the same step, and rank 0 has printed why.
    """
    REQUEUE = 75
    """The run was preempted and saved, and should be started again; sysexits.h calls this number `EX_TEMPFAIL`.

    No rank ends with this code before all ranks have agreed to stop and the state is on disk.
    """
    NEXT_PHASE = 76
    """A phase of the run has ended and is saved: start the run again at once for its next phase (our launchers do so)."""
    INTERRUPTED = 130
    """A user pressed Ctrl-C; the run is saved."""


def shown(value: object) -> str:
    """Format a value for a message, shortened.

    Strings are cut to 60 characters and lists to three items. Integers above 64 bits give their number of bits. Nested containers,
    dicts with more than three keys and other objects give their type. `repr` alone would fail for an integer with 10,000 digits.
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
    if (
        isinstance(value, dict)
        and len(value) <= 3
        and not any(isinstance(inner, dict | list) for inner in value.values())
    ):
        return "{" + ", ".join(f"{shown(key)}: {shown(inner)}" for key, inner in value.items()) + "}"
    return f"a {type(value).__name__}"


def brief(text: str) -> str:
    """Cut a text to `LONGEST_SHOWN` characters for one line in a message. Unprintable ones are escaped first."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}.. ({len(text):,} characters)"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun, such as "1 file" or "12,000 files".

    Args:
        plural: plural of `noun`; "": `noun` with an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def attempt_name(attempt: int) -> str:
    """Format an attempt at a run for messages: `attempt` 0 is "attempt 1"."""
    return f"attempt {attempt + 1}"


class TriaxisError(Exception):
    """Base class for all errors meant for users, which are printed without a traceback."""

    exit_code: ExitCode = ExitCode.MISTAKE


class ConfigError(TriaxisError):
    """One or more problems in a configuration.

    Attributes:
        problems: a readable line or paragraph for each problem.
    """

    def __init__(self, problems: Sequence[str], source: str = "the configuration") -> None:
        self.problems = tuple(problems)
        body = "\n".join(f"  {number}. {text}" for number, text in enumerate(self.problems, start=1))
        super().__init__(f"{source} has {counted(len(self.problems), 'problem')}:\n{body}")


class TopologyError(TriaxisError):
    """Ranks, nodes or groups that do not exist or do not fit together."""


class ModelError(TriaxisError):
    """Modules with parameters or buffers that the model's parameter list lacks."""


class PortTakenError(TopologyError):
    """A rendezvous port that another process uses. The ranks can meet later, or on another port."""

    exit_code = ExitCode.BROKE


class ScheduleError(TriaxisError):
    """A pipeline schedule that is incomplete, out of order, or would deadlock."""


class DataError(TriaxisError):
    """A corpus, an index or a tokenizer that is missing, truncated or of another kind."""


class CheckpointError(TriaxisError):
    """A checkpoint that is missing, incomplete, damaged, or from another model."""


class SaveError(CheckpointError):
    """A failure to write the run's last checkpoint.

    Once the disk has room, the same command resumes from an earlier checkpoint.
    """

    exit_code = ExitCode.BROKE


class StorageError(TriaxisError):
    """A run folder that cannot be used.

    For example, another user owns the folder, or it is read-only.

    Args:
        text: the message.
        is_passing: whether a later start may succeed, as after a full disk. The exit code is `BROKE` if True, `MISTAKE` if False.
    """

    def __init__(self, text: str, *, is_passing: bool = False) -> None:
        self.exit_code = ExitCode.BROKE if is_passing else ExitCode.MISTAKE
        super().__init__(text)


class OutputError(TriaxisError):
    """A failure to write standard output, for example on a full disk."""

    exit_code = ExitCode.BROKE


class OutOfMemoryError(TriaxisError):
    """A rank out of memory, which would fail again with the same configuration."""


class PeerLostError(TriaxisError):
    """A lost connection to another rank, which has failed or does not answer. The same command resumes the run."""

    exit_code = ExitCode.BROKE


class NoRoomError(TriaxisError):
    """A heartbeat file for which no folder on the node has room.

    Once a folder has room, the same command can start.
    """

    exit_code = ExitCode.BROKE


class ReplicaError(TriaxisError):
    """Replicated weights that differ between ranks: memory, a link or a kernel has failed."""

    exit_code = ExitCode.REPLICAS_DIFFER


class DivergenceError(TriaxisError):
    """A loss or gradient that is not finite, a loss spike, or overflowing expert buffers.

    The `resilience` settings give no remedy, or their remedies are used up. Every rank raises this error after the same step.
    """

    exit_code = ExitCode.DIVERGED
