"""Recognise other engines' options in a command line, and answer with the Triaxis overrides.

    --tensor-model-parallel-size 2, --tp 2     ->  parallel.tp=2, and the whole command with it, to paste
    --num-layers 24 --hidden-size 2048 ...     ->  the command that converts a Megatron-LM command line to a config

If another config value contradicts the new one, the printed command also sets that value to the nearest legal one.
"""

import argparse
import os
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triaxis.engine.config.load import ENVIRONMENT, as_overrides, load_config
from triaxis.engine.config.names.foreign_names import ALWAYS_ON, our_name, unknown_key
from triaxis.engine.config.names.megatron_arguments import ARGUMENTS
from triaxis.engine.config.rules.check import broken_rules
from triaxis.engine.config.rules.problem import plain
from triaxis.engine.config.schema.dotted import with_fields
from triaxis.engine.config.tree import Config
from triaxis.engine.config.type_problems import meaning, needed_keys
from triaxis.engine.config.yaml_text import read_yaml
from triaxis.engine.errors import ConfigError
from triaxis.engine.program import triaxis
from triaxis.models.interop.megatron.command_line.convert import from_command_line

SCRIPT = "TRIAXIS_SCRIPT"
"""Variable with the path of launch/pretrain_gpt.sh as it was typed, if that script started the command."""

TRAIN = "train"
"""Command that the script starts."""

Parse = Callable[[Sequence[str]], argparse.Namespace]

DESCRIBES_A_MODEL = frozenset({"num-layers", "hidden-size"})
"""Megatron-LM arguments that, in the absence of a Triaxis config, mark a complete Megatron-LM command line."""

OF_A_SCRIPT = "`triaxis new --help` shows how to convert a whole Megatron-LM command line or script to a config."


@dataclass
class _Answer:
    """A command line translated to Triaxis options and overrides.

    Attributes:
        arguments: all words, with other engines' options replaced.
        replaced: replaced options, with their values.
        overrides: Triaxis overrides for the replaced options.
        notes: reasons for options that are left out.
        problems: options that have no single equivalent here.
    """

    arguments: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def answers(
    prog: str,
    arguments: Sequence[str],
    unknown: Collection[str],
    parse: Parse,
    read_without: Path | None,
) -> list[str]:
    """Return messages with the Triaxis equivalents of other engines' options, if there are such options.

    Args:
        prog: command, such as `triaxis train`.
        arguments: all words after the command.
        unknown: option words that the command lacks.
        parse: parser for the command's words, which raises ConfigError for a bad one.
        read_without: config that the command reads if none is given; None: it reads none.
    """
    names = [word.lstrip("-").partition("=")[0].replace("_", "-") for word in unknown]
    if set(names) >= DESCRIBES_A_MODEL and not any(map(_is_yaml, arguments)):
        return _of_a_whole_line(prog, arguments, unknown)
    answer = _in_our_words(arguments, unknown)
    problems = (
        [_with_command(prog, answer, parse, read_without), *answer.problems] if answer.replaced else answer.problems
    )
    if problems and sum(name in ARGUMENTS for name in names) > 1:
        problems[-1] += f"\n     {OF_A_SCRIPT}"
    return problems


def _in_our_words(arguments: Sequence[str], unknown: Collection[str]) -> _Answer:
    """Replace other engines' options with Triaxis overrides.

    An option that no engine has becomes a problem only if another engine's option occurs too.
    """
    answer, strangers = _Answer(), list[str]()
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word not in unknown:
            answer.arguments.append(word)
            continue
        name, equals, given = word.partition("=")
        meant = our_name(name)
        key, has_value, _ = (meant or "").partition("=")
        value = given if equals else None
        if meant is not None and value is None and words and not has_value and _takes(key, words[0]):
            value = words.pop(0)
        typed = word if value is None or equals else f"{word} {value}"
        overrides = (
            [] if meant is None or " " in meant else [meant] if has_value else as_overrides(key, value or "true")
        )
        if overrides or key in ALWAYS_ON:
            answer.arguments += overrides
            answer.overrides += overrides
            answer.replaced.append(typed)
            answer.notes += [f"{typed} is left out: {ALWAYS_ON[key]}."] if key in ALWAYS_ON else []
        elif meant is not None:
            answer.problems.append(
                f"{typed} is not an option here; use {meant}{meaning(key.split('.'))}.{needed_keys(key)}"
            )
        elif unknown_key(name).startswith(f"{name}: unknown key"):
            strangers.append(f"unknown option {word}; an override reads section.key=value, such as train.steps=20.")
        else:
            answer.problems.append(unknown_key(name))
    answer.problems += strangers if answer.replaced or answer.problems else []
    return answer


def _takes(key: str, word: str) -> bool:
    """Whether `word`, typed after another engine's option for the field `key`, is the option's value."""
    if as_overrides(key, "true"):
        return word.lower() in ("true", "false")
    return not word.startswith("--")


def _with_command(prog: str, answer: _Answer, parse: Parse, read_without: Path | None) -> str:
    """Format the overrides for the replaced options, and the whole command to paste.

    If an option has no single equivalent, there is no command. If the command would not start, the reason is given instead.
    """
    replaced = ", ".join(answer.replaced)
    written = " ".join(map(shlex.quote, answer.overrides))
    unknown = "is not an option" if len(answer.replaced) == 1 else "are not options"
    said = f"{replaced} {unknown} here; {f'use {written}' if written else 'leave it out'}"
    if answer.problems:
        return f"{said}."
    try:
        args = parse(answer.arguments)
        added, reasons = _added(args.config or read_without, args.overrides, answer.overrides)
    except ConfigError as error:
        return f"{said}. Then: {' '.join(error.problems)}"
    fields = [override.partition("=")[0] for override in answer.overrides]
    variables = [
        f"{name}={shlex.quote(os.environ[name])}"
        for name, key in ENVIRONMENT.items()
        if os.environ.get(name) and key not in fields
    ]
    place = answer.arguments.index(answer.overrides[-1]) + 1 if added else 0
    words = [*answer.arguments[:place], *added, *answer.arguments[place:]]
    line = " ".join([*variables, _start(prog, words)])
    return "\n".join([f"{said}:", f"       {line}", *(f"     {note}" for note in (*answer.notes, *reasons))])


def _added(path: Path | None, given: Sequence[str], overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Find further overrides that make the config legal after the new `overrides`.

    Returns:
        (further overrides, reason for each of them).

    Raises:
        ConfigError: no such override makes the config legal.
    """
    if path is None:
        return [], []
    try:
        load_config(path, given, os.environ)
    except ConfigError as error:
        refused = error
    else:
        return [], []
    try:
        before = load_config(path, [word for word in given if word not in overrides], os.environ)
    except ConfigError:
        raise refused from None
    asked = {key: read_yaml(value) for key, _, value in (word.partition("=") for word in overrides)}
    config = with_fields(before, asked)
    typed = {word.partition("=")[0] for word in given}
    added: dict[str, object] = {}
    reasons = []
    for problem in broken_rules(config):
        # Changing the model, or a field that the user typed, is not what was meant.
        mends = ((key, next(iter(values))) for key, values in problem.candidates.items() if key not in typed)
        mend = next(((key, value) for key, value in mends if not key.startswith("model.")), None)
        if mend is not None:
            added[mend[0]] = mend[1]
            reasons.append(f"With {mend[0]}={plain(mend[1])}: {problem.key} = {plain(problem.value)} {problem.rule}.")
    if left := broken_rules(with_fields(config, added) if added else config):
        raise ConfigError([str(problem) for problem in left])
    return [f"{key}={plain(value)}" for key, value in added.items()], reasons


def _start(prog: str, words: Sequence[str]) -> str:
    """Format the shell line that runs `prog` with these words, through the launch script if the user typed that."""
    script, command = os.environ.get(SCRIPT), prog.split()[1:]
    return (
        shlex.join(["bash", script, *words])
        if script and command == [TRAIN]
        else triaxis(shlex.join([*command, *words]))
    )


def _of_a_whole_line(prog: str, arguments: Sequence[str], unknown: Collection[str]) -> list[str]:
    """Format two shell commands: one converts a Megatron-LM command line to a config, the other runs `prog` with it."""
    names = set(Config.dotted_names())
    ours = [
        word for word in arguments if word.partition("=")[0] in names or (word.startswith("--") and word not in unknown)
    ]
    theirs = shlex.join(word for word in arguments if word not in ours)
    said = (
        "this is a command line of Megatron-LM. Convert it to a config and use that (docs/interop.md):\n"
        "       " + triaxis(f"new --from {shlex.quote(theirs)} > megatron.yaml") + "\n"
        f"       {_start(prog, ['megatron.yaml', *ours])}"
    )
    try:
        from_command_line([theirs])
    except ConfigError as error:
        return [f"{said}\n     The first command will report the following.", *error.problems]
    return [said]


def _is_yaml(word: str) -> bool:
    return Path(word).suffix in (".yaml", ".yml")
