"""Configuration rules for phases: their names, their ends, and settings that do not allow several phases."""

from collections.abc import Collection, Iterator

from triaxis.engine.config.quantities.run_phases import run_phases
from triaxis.engine.config.rules.problem import Problem, Rule, Subject
from triaxis.engine.config.schema.phases import PHASE_FIELDS, PHASE_SECTIONS


def phases_follow_each_other(subject: Subject) -> Iterator[Problem]:
    config = subject.config
    seen: set[str] = set()
    for number, entry in enumerate(config.phases):
        if entry["name"] in seen:
            yield Problem(
                f"phases.{number}.name",
                entry["name"],
                "is the name of two phases: a report could not say which of them it means",
                advice="Give each a name of its own.",
            )
        seen.add(entry["name"])
    for phase in run_phases(config):
        if config.phases and phase.end_step == phase.first_step:
            yield Problem(
                f"phases.{phase.number}.until",
                config.phases[phase.number]["until"],
                f"must be more than {phase.first_token:,}, the tokens at the end of the phase before it (whole steps): the phase "
                "would have no step",
                advice="`until` counts tokens from the start of the run.",
            )
    if config.phases and config.train.phase not in (None, *seen):
        yield subject.problem("train.phase", f"must be one of the phases {', '.join(sorted(seen))}")


def phases_can_change(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each field whose value does not allow several phases, or phases with different batch sizes or lengths."""
    config, phases = subject.config, run_phases(subject.config)
    sizes = {phase.tokens_per_step for phase in phases}
    if len(sizes) > 1:
        for key, tokens in (("warmup_steps", "warmup_tokens"), ("decay_steps", None)):
            if getattr(config.optimizer, key):
                instead = f"Give optimizer.{tokens}." if tokens else "Leave it out: the decay ends with the run."
                yield subject.problem(
                    f"optimizer.{key}",
                    f"counts steps, and steps of the phases have {' or '.join(f'{size:,}' for size in sorted(sizes))} tokens: the "
                    "learning rate would jump at an edge",
                    {f"optimizer.{key}": [type(config.optimizer).model_fields[key].default]},
                    instead,
                )
    lengths = {phase.tokens_per_step // phase.samples_per_step for phase in phases}
    if len(lengths) > 1 and config.model.position == "learned":
        yield subject.problem(
            "model.position",
            f"is a table of one row per position, and phases have samples of {' or '.join(map(str, sorted(lengths)))} tokens: "
            "the rows of longer samples would be random",
            {"model.position": ["rope"]},
        )


def refused_field(key: str, known: Collection[str]) -> str | None:
    """Explain why a phase cannot have the field `key`, in words that follow the field's name; None if it can.

    Args:
        key: the field's dotted name.
        known: dotted names of all configuration fields.
    """
    if key in PHASE_FIELDS or (key.split(".")[0] in PHASE_SECTIONS and key in known):
        return None
    if key not in known:
        return ": there is no such field; a phase has a name, an end (until) and dotted names of the configuration"
    return (
        " is one field of the whole run: it cannot change at the edge of a phase. A phase may have "
        f"{', '.join(PHASE_FIELDS)}, and fields of {', '.join(PHASE_SECTIONS)}"
    )


PHASE_RULES: tuple[Rule, ...] = (phases_follow_each_other, phases_can_change)
