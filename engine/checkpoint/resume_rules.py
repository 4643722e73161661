"""Defines which differences are allowed between a saved run and the run that continues it.

Each configuration field has one of three verdicts, which says what happens if the field differs:

    layout    tp, pp, dp, schedule, recompute, kernels, telemetry, ...    allowed and printed, since only the speed changes
    meant     learning rate, data, dtype, length of the run, ...          allowed if named in `checkpoint.accept`
    never     shape of the model, samples per step                        refused, since the saved state would be meaningless

The configuration's sections declare the verdicts (`triaxis.engine.config.schema.section.OnResume`).
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_jsonable_python

from triaxis.engine.config.quantities.plan import planned_steps, planned_tokens
from triaxis.engine.config.quantities.run_phases import past_differs
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.phases import PHASE_FIELDS, fields_of
from triaxis.engine.config.schema.section import Section, Verdict
from triaxis.engine.config.tree import Config, resume_verdict
from triaxis.engine.errors import CheckpointError
from triaxis.engine.storage.redaction import tree_without_secrets

_OPTIMIZER = "optimizer.name"

_SHOWN = 12

SEQUENCE_COUNTS = "model.moe.balance.sequence_counts"
"""Field for what the sequence loss counts; a resumed run keeps the saved value (`with_kept_counts`).

Older versions always counted `choices`.
"""

ABSENT = "absent"
"""Shown value of a field that one of the two configurations lacks."""


@dataclass(frozen=True, slots=True)
class Change:
    """A differing field: dotted name, value in the saved run (`there`) and in this one (`here`), and verdict."""

    key: str
    there: Any
    here: Any
    verdict: Verdict

    def __str__(self) -> str:
        return f"{self.key}: {self.there} there, {self.here} here"


def changes(there: Mapping[str, Any], config: Config) -> list[Change]:
    """List every field that differs between a saved configuration and `config`, in field order.

    These are never differences: secrets, fields that a phase sets (`phases` is compared as a whole), and an unsaved
    `sequence_counts`. Any other unsaved field counts as its default if its section was saved or the field affects only speed;
    else as "absent". If a section is null on one side, each of its fields on the other side is a difference.
    """
    # Recorded values contain no secrets, so a renewed secret is no difference.
    saved = dict(flat(tree_without_secrets({key: value for key, value in there.items() if key != "format_version"})))
    asked = dict(flat(tree_without_secrets(config.model_dump(mode="json"))))
    sections = {"", *(key.rpartition(".")[0] for key in saved)}
    asked_sections = {key.rpartition(".")[0] for key in asked}
    # These values follow from the phases, which are compared as a whole.
    of_phases = {key for entry in (*saved.get("phases", ()), *config.phases) for key in fields_of(entry)}
    found = []
    for key in [*asked, *(key for key in saved if key not in asked)]:
        verdict = resume_verdict(config, key)
        has_default = verdict == "layout" or key.rpartition(".")[0] in sections
        if any(key == name or key.startswith(f"{name}.") for name in of_phases):
            continue
        if key == SEQUENCE_COUNTS and key not in saved:
            continue
        was = saved[key] if key in saved else _default(key) if has_default else ABSENT
        now = asked.get(key, ABSENT)
        is_section = (was is None and key in asked_sections) or (now is None and key in sections)
        if was != now and not is_section:
            found.append(Change(key, was, now, verdict))
    return found


def with_kept_counts(there: Mapping[str, Any], config: Config) -> Config:
    """Return `config` with `sequence_counts: choices` if the saved run's sequence loss (MoE) counted chosen experts.

    Runs that do not record the field counted chosen experts. `config` is returned unchanged if `checkpoint.accept` names the
    field, or the saved run has no sequence loss.

    Args:
        there: the saved run's configuration, as JSON.
        config: configuration of the continuing run.
    """
    saved, moe = dict(flat(there)), config.model.moe
    is_asked = moe is None or not moe.counts_scores or _covered(SEQUENCE_COUNTS, config.checkpoint.accept)
    has_loss = bool(saved.get("model.moe.balance.sequence_loss"))
    if is_asked or not has_loss or saved.get(SEQUENCE_COUNTS, "choices") == "scores":
        return config
    return with_value(config, SEQUENCE_COUNTS, "choices")


def lengthening(config: Config, num_steps: int) -> str:
    """Return the overrides, as text, that let a finished run continue to twice `num_steps` steps.

    With phases, the text says to raise `until` of the last phase, and names no number.
    """
    accept = list(config.checkpoint.accept)
    tokens, steps = planned_tokens(config), planned_steps(config)
    if config.phases:
        key, words = "phases", "a larger `until` of its last phase and"
    elif config.train.tokens is not None and tokens and steps:
        key, words = "train.tokens", f"train.tokens={2 * num_steps * (tokens // steps)}"
    else:
        key, words = "train.steps", f"train.steps={2 * num_steps}"
    if resume_verdict(config, key) == "meant" and not _covered(key, accept):
        accept.append(key)
    return f"{words} {accepting(accept)}" if accept else words


def accepting(names: Sequence[str]) -> str:
    """Return the override that accepts differences in these fields, quoted for the shell."""
    return shlex.quote(f"checkpoint.accept=[{','.join(names)}]")


def refuse_other_past(there: Mapping[str, Any], config: Config, consumed_tokens: int, source: str) -> None:
    """Refuse a `phases` setting under which the consumed tokens would have been read differently.

    Args:
        there: configuration of the saved run, which consumed the tokens, as JSON.
        config: configuration of the continuing run.
        consumed_tokens: tokens consumed so far.
        source: name of the checkpoint that has the saved configuration, for the message.

    Raises:
        CheckpointError: under `config` other samples or batches would have been read, or `there` does not record what was read.
    """
    if consumed_tokens == 0 or not (there.get("phases") or config.phases):
        return
    try:
        saved = Config.model_validate({key: value for key, value in there.items() if key != "format_version"})
        difference = past_differs(saved, config, consumed_tokens)
    except ValidationError:
        difference = "its configuration is incomplete, so it is unknown which data it has read"
    if difference is not None:
        raise CheckpointError(
            f"{source} has consumed {consumed_tokens:,} tokens differently from this run's phases: {difference}. Samples would be "
            "repeated or left out silently. Keep the phases up to that point as they were trained; change only later ones."
        )


def refuse(found: Sequence[Change], accept: Sequence[str], source: str) -> None:
    """Raise one error that lists all differences that are not allowed.

    Args:
        found: differences, from `changes`.
        accept: value of `checkpoint.accept`: the fields or sections that the user allows to differ.
        source: name of the checkpoint that has the saved configuration, for the message.

    Raises:
        CheckpointError: a field with the verdict `never` differs, or one with the verdict `meant` that `accept` does not name.
    """
    never = [change for change in found if change.verdict == "never"]
    unmeant = [change for change in found if change.verdict == "meant" and not _covered(change.key, accept)]
    if not never and not unmeant:
        return
    lines = []
    if never:
        lines.append("These may not change: the weights, or the place in the data, would mean something else.")
        lines += _listed(never)
        if any(change.key == _OPTIMIZER for change in never):
            lines.append("  One optimizer cannot use another's moments. To start a new run from the weights alone:")
            lines.append("  checkpoint.load_what=weights")
        if phased := [change.key for change in never if change.key in PHASE_FIELDS]:
            lines.append(
                f"  (A run may change {' and '.join(phased)} on its way as a phase: let `phases` begin with what was trained,"
            )
            lines.append("  until the tokens that are consumed, and give the next one the new value.)")
    if unmeant:
        word = accepting([*accept, *(change.key for change in unmeant)])
        lines.append(f"These change what is trained. If they are meant: {word}")
        lines += _listed(unmeant)
    raise CheckpointError(f"{source} has another configuration.\n" + "\n".join(lines))


def _default(key: str) -> Any:
    """Return a field's default as JSON. `ABSENT` means no default, or an optional section."""
    *sections, name = key.split(".")
    section: type[Section] = Config
    for inner in sections:
        found = section.section_type(inner)
        if found is None or section.model_fields[inner].default is None:
            return ABSENT
        section = found
    field = section.model_fields[name]
    return ABSENT if field.is_required() else to_jsonable_python(field.get_default(call_default_factory=True))


def _covered(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _listed(found: Sequence[Change]) -> Iterator[str]:
    yield from (f"  {change}" for change in found[:_SHOWN])
    if len(found) > _SHOWN:
        yield f"  and {len(found) - _SHOWN} more"


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every leaf of a tree. A list is a leaf; an empty mapping yields nothing."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
