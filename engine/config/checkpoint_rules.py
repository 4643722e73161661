"""The rules of the `checkpoint` section (no torch here)."""

from collections.abc import Iterator

from engine.config.problems import Problem, Rule, Subject, multiples
from engine.config.schema import Config


def weights_come_from_somewhere(subject: Subject) -> Iterator[Problem]:
    checkpoint = subject.config.checkpoint
    if checkpoint.load_what == "weights" and checkpoint.load is None:
        yield Problem(
            "checkpoint.load_what",
            checkpoint.load_what,
            "says what to take from checkpoint.load, which is null: the run would start from random weights",
            {"checkpoint.load_what": ["all"]},
            "Or give checkpoint.load=PATH.",
        )


def kept_steps_are_saved(subject: Subject) -> Iterator[Problem]:
    checkpoint = subject.config.checkpoint
    if checkpoint.keep_every is None:
        return
    if checkpoint.interval is None or checkpoint.keep_every % checkpoint.interval:
        yield Problem(
            "checkpoint.keep_every",
            checkpoint.keep_every,
            f"must be a multiple of checkpoint.interval = {checkpoint.interval}: other steps are never saved, so none of them "
            "would be kept",
            {
                "checkpoint.keep_every": (
                    [None] if checkpoint.interval is None else multiples(checkpoint.interval, checkpoint.keep_every)
                ),
            },
        )


def accepted_fields_exist(subject: Subject) -> Iterator[Problem]:
    accepted = subject.config.checkpoint.accept
    unknown = [name for name in accepted if name not in set(Config.dotted_names())]
    if unknown:
        yield Problem(
            "checkpoint.accept",
            accepted,
            f"must hold fields or sections of the configuration, and {', '.join(unknown)} is none: a difference that was meant "
            "would still be refused",
            {},
            "Write them as they stand in the message that refused them, such as optimizer.lr.",
        )


CHECKPOINT_RULES: tuple[Rule, ...] = (weights_come_from_somewhere, kept_steps_are_saved, accepted_fields_exist)
