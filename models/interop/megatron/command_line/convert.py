"""Convert a Megatron-LM command line to a config with a header comment.

    words -> Parsed -> sections -> Config, checked by all rules -> YAML

The comment lists what was left out. An argument that changes training and has no counterpart here is refused, unless `--ignore`
names it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from triaxis.engine.config.tree import Config, problems
from triaxis.engine.config.write import commented_lines
from triaxis.engine.errors import ConfigError, shown
from triaxis.models.interop.megatron.command_line.model_args import model_fields
from triaxis.models.interop.megatron.command_line.other_args import layout_fields, run_fields
from triaxis.models.interop.megatron.command_line.parse import Parsed, parse, words_of
from triaxis.models.interop.megatron.command_line.training_args import training_fields

SOURCE = "the command line of Megatron-LM"
HEAD_WIDTH = 128
"""Width in columns of the YAML's header comment."""

Sections = dict[str, dict[str, Any]]


def from_command_line(texts: Sequence[str], vocab_size: int | None = None, ignored: Sequence[str] = ()) -> str:
    """Write the config for the run that a Megatron-LM command line describes.

    The result is YAML text.

    Args:
        texts: command-line words, or texts with several words each; `@path` is replaced with the words in a file.
        vocab_size: number of tokens in the tokenizer; None takes it from --vocab-size.
        ignored: names of given arguments to leave out. A supported argument is refused, unless its given value is not supported.

    Raises:
        ConfigError: the arguments have problems, or no counterpart and are not `ignored`; or the config breaks a rule.
    """
    names = {name.lstrip("-") for name in ignored}
    parsed = parse(words_of(texts), names)
    sections, notes = _sections(parsed, vocab_size)
    found = [*parsed.problems]
    found += [
        f"--{name}: no counterpart here: {why}. Leave it out, or pass it over: --ignore {name}."
        for name, why in parsed.missing.items()
        if name not in names
    ]
    found += [
        f"--ignore {name}: not among the arguments that are given. Remove it."
        for name in sorted(names - {*parsed.given, *parsed.missing})
    ]
    found += [
        f"--ignore {name}: it is no argument without a counterpart, and would be read all the same. Remove it."
        for name in sorted(names & parsed.read - parsed.missing.keys())
    ]
    if not found:
        found += _broken(sections)
    if found:
        raise ConfigError(found, SOURCE)
    passed_over = sorted(names - parsed.missing.keys())
    return "\n".join([*_head(parsed, passed_over, notes), *_yaml(sections)]) + "\n"


def _sections(parsed: Parsed, vocab_size: int | None) -> tuple[Sections, list[str]]:
    """Build config sections, and notes for the user as comment texts. Problems are added to `parsed`."""
    notes: list[str] = []
    training = training_fields(parsed, notes)
    sections = {"model": model_fields(parsed, vocab_size), **training}
    sections |= layout_fields(parsed, notes) | run_fields(parsed, notes)
    order = ["model", "data", "train", "eval", "parallel", "optimizer", "precision", "recompute"]
    return {name: sections[name] for name in dict.fromkeys([*order, *sections]) if name in sections}, notes


def _broken(sections: Sections) -> list[str]:
    """List the problems that config validation finds in the sections."""
    try:
        config = Config.model_validate(sections)
    except ValidationError as error:
        return [
            f"{'.'.join(map(str, detail['loc']))} = {shown(detail['input'])}, from the arguments: {detail['msg']}."
            for detail in error.errors(include_url=False)
        ]
    return problems(config)


def _head(parsed: Parsed, unknown: Sequence[str], notes: Sequence[str]) -> Iterator[str]:
    yield "# From a command line of Megatron-LM; defaults of its version 0.16 are written out."
    for name, why in parsed.missing.items():
        yield from _wrapped(f"NO COUNTERPART, left out: --{name}: {why}.")
    for name in unknown:
        yield from _wrapped(f"UNKNOWN, left out: --{name}.")
    for topic, names in parsed.without_effect.items():
        yield from _wrapped(f"Without effect here ({topic}): {', '.join(names)}.")
    for note in notes:
        yield from _wrapped(f"Note: {note}.")


def _wrapped(text: str) -> Iterator[str]:
    """Wrap the text into comment lines, indented after the first."""
    line = "#"
    for word in text.split():
        if len(line) + 1 + len(word) > HEAD_WIDTH:
            yield line
            line = "#  "
        line += f" {word}"
    yield line


def _yaml(sections: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, section in sections.items():
        yield f"{name}:"
        for field, value in section.items():
            yield from commented_lines(field, value, None, "  ")
