"""Rules about a run's name, folders and time limits."""

from collections.abc import Iterator

from triaxis.engine.config.rules.problem import Problem, Rule, Subject
from triaxis.engine.config.values.places import LONGEST_NAME
from triaxis.engine.storage.redaction import REDACTED, why_secret, without_secrets

MOST_NAME_BYTES = 200
"""Maximum bytes in a run name. File systems allow 255, and the run's files append to the name."""


def accepted_fields_exist(subject: Subject) -> Iterator[Problem]:
    accepted = subject.config.checkpoint.accept
    unknown = [name for name in accepted if name not in set(type(subject.config).dotted_names())]
    if unknown:
        yield subject.problem(
            "checkpoint.accept",
            f"must hold fields or sections of the configuration, and {', '.join(unknown)} is none: a difference that was meant "
            "would still be refused",
            {},
            "Copy them from the message that refused them, such as optimizer.lr.",
        )


def name_is_a_folder(subject: Subject) -> Iterator[Problem]:
    if subject.config.runtime.name is not None:
        yield from name_problems(subject.config.runtime.name)


def name_problems(name: str) -> Iterator[Problem]:
    """Yield a problem if `name` cannot name a run directory in `runtime.runs_dir`."""
    if why := why_secret(name):
        yield Problem("runtime.name", REDACTED, why)
    elif not name.strip() or name in (".", "..") or "/" in name or "\0" in name:
        plain = name.replace("/", "-").replace("\0", "").strip(" .-")
        yield Problem(
            "runtime.name",
            name,
            "must be a plain folder name: the run would be written elsewhere than in runtime.runs_dir",
            {"runtime.name": [plain] if plain else []},
            "Choose a name without slashes.",
        )
    elif not name.isprintable() or len(name) > LONGEST_NAME or len(name.encode()) > MOST_NAME_BYTES:
        plain = "".join(letter for letter in name if letter.isprintable())[:LONGEST_NAME]
        plain = plain.encode()[:MOST_NAME_BYTES].decode(errors="ignore").strip(" .-")
        yield Problem(
            "runtime.name",
            name if name.isprintable() else repr(name),
            f"must be one line of at most {LONGEST_NAME} printable characters and {MOST_NAME_BYTES} bytes: no folder could "
            "have that name, or no log show it",
            {"runtime.name": [plain] if plain else []},
            "Choose a shorter name of one line.",
        )


def places_hold_no_secret(subject: Subject) -> Iterator[Problem]:
    config = subject.config
    places = (("runtime.runs_dir", config.runtime.runs_dir, "runs"), ("checkpoint.dir", config.checkpoint.dir, None))
    for key, place, default in places:
        if place not in (None, default) and (why := why_secret(place)):
            yield Problem(key, without_secrets(place), why, {key: [default]})


def hang_is_seen_before_the_timeout(subject: Subject) -> Iterator[Problem]:
    runtime = subject.config.runtime
    if runtime.hang_seconds is not None and runtime.hang_seconds >= runtime.timeout_seconds:
        yield subject.problem(
            "runtime.hang_seconds",
            f"must be below runtime.timeout_seconds = {runtime.timeout_seconds:g}: the collectives would fail before a report "
            "shows which rank waits for which",
            {
                "runtime.hang_seconds": [runtime.timeout_seconds / 2, None],
                "runtime.timeout_seconds": [2 * runtime.hang_seconds],
            },
        )


RUN_RULES: tuple[Rule, ...] = (
    accepted_fields_exist,
    name_is_a_folder,
    places_hold_no_secret,
    hang_is_seen_before_the_timeout,
)
