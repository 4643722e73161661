"""Parse a Megatron-LM command line, and sort its arguments by their meaning here.

torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --bf16 --log-throughput --fp8-format hybrid
                                           |                      |                `- no counterpart: refused, or ignored
         the launcher's, left out          `- read: args          `- without effect here
"""

import ast
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from triaxis.engine.config.names.megatron_arguments import (
    ARGUMENTS,
    LISTS,
    READ,
    SWITCHES,
    WITHOUT_EFFECT,
    Argument,
    typed,
)
from triaxis.engine.errors import ConfigError, brief, shown
from triaxis.engine.storage.elsewhere import why_no_path
from triaxis.engine.storage.state_files import read_text

MOST_LISTED = 10_000
"""Maximum number of list entries that an expression may produce."""


@dataclass
class Parsed:
    """Parsed Megatron-LM command line.

    Attributes:
        args: values of all supported arguments, by `Argument.dest`, as Megatron-LM's parser would set them, defaults included.
        given: names of the arguments that were given, without leading dashes, in order.
        without_effect: topic -> names of given arguments that have no effect here.
        missing: name of an argument -> why its feature has no counterpart here.
        swallowed: names of arguments that `--ignore` left out with all of their words, because these could not be read.
        problems: problems with the command line, as sentences.
    """

    args: dict[str, Any]
    given: list[str] = field(default_factory=list)
    without_effect: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    swallowed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def lacks(self, name: str, why: str) -> None:
        """Record why a feature has no counterpart here. The argument `name` switches the feature on. The first reason stays."""
        self.missing.setdefault(name, why)


def words_of(texts: Sequence[str]) -> list[str]:
    """Split texts into words as a shell does.

    A word `@path` is replaced with the words in that file. A file's lines may end in a backslash, and `#` starts a comment.

    Raises:
        ConfigError: a quote is not closed, or a file cannot be read.
    """
    words = []
    for text in texts:
        for word in _split(text, "the command line"):
            if not word.startswith("@"):
                words.append(word)
                continue
            try:
                content = read_text(Path(word[1:]))
            except (OSError, ValueError) as error:
                raise ConfigError(
                    [
                        f"it cannot be read as text: {why_no_path(word[1:]) or error}. Give @PATH of a file of arguments."
                    ],
                    brief(word),
                ) from error
            words += _split(content, word)
    return words


def parse(words: Sequence[str], ignored: Collection[str] = ()) -> Parsed:
    """Parse the words of a command line, and collect problems in the result.

    Args:
        words: words from `words_of`; a launcher and the script's name, such as pretrain_gpt.py, are skipped.
        ignored: argument names without leading dashes. An argument among these is left out if its words cannot be read.
    """
    parsed = Parsed({each.dest: each.default for each in ARGUMENTS.values() if each.group in READ})
    values: dict[str, list[str]] = {}
    for name, found in _by_name(_without_launcher(words), parsed.problems):
        if values.get(name, found) != found and name not in ignored:
            parsed.problems.append(
                f"--{name} is given twice, with {_text(values[name])} and {_text(found)}: Megatron-LM takes the last. Remove one."
            )
        values[name] = found
    parsed.given = list(values)
    for name, found in values.items():
        problem = _read(name, found, parsed)
        if problem and name in ignored:
            parsed.swallowed.append(name)
        elif problem:
            parsed.problems.append(problem)
    return parsed


def _split(text: str, source: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError([f"it cannot be split into words: {error}. Balance its quotes."], source) from error


def _without_launcher(words: Sequence[str]) -> Sequence[str]:
    """Drop the words up to and including the first .py word, if no argument of Megatron-LM precedes it."""
    script = next(
        (place for place, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")), None
    )
    known = next((place for place, word in enumerate(words) if word.removeprefix("--") in ARGUMENTS), len(words))
    return words if script is None or script > known else words[script + 1 :]


def _by_name(words: Sequence[str], problems: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each argument's name without dashes, and its values. Words before the first name are a problem."""
    name: str | None = None
    found: list[str] = []
    strays = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            if name is not None:
                yield name, found
            name, equals, value = word[2:].partition("=")
            found = [value] if equals else []
        elif name is None:
            strays.append(word)
        else:
            found.append(word)
    if name is not None:
        yield name, found
    if strays:
        problems.append(f"{_text(strays)}: no argument. Each one begins with two dashes, such as --num-layers 24.")


def _read(name: str, found: list[str], parsed: Parsed) -> str | None:
    """Record an argument's values in `parsed`, or return the problem with them."""
    argument = ARGUMENTS.get(name)
    if argument is None:
        return _unknown(name)
    if argument.group not in (*READ, *WITHOUT_EFFECT) and (argument.other_values(found) or not argument.accepted):
        parsed.lacks(name, argument.why or "")
    if unfilled := next((value for value in found if "$" in value), None):
        return (
            f"--{name} {unfilled}: a shell variable that was not filled in. Give its value, or the script that sets it with "
            "`triaxis new --run-script`."
        )
    if wrong := _wrong_number(argument, found):
        return wrong
    if argument.group in WITHOUT_EFFECT:
        parsed.without_effect.setdefault(argument.group, []).append(name)
    if argument.group not in READ:
        return None
    try:
        value = pattern(found[0]) if argument.kind == "pattern" else typed(argument.kind, found)
    except (ValueError, SyntaxError):
        return f"--{name} {_text(found)}: must be {_MEANING[argument.kind]}."
    if argument.accepted and (others := argument.other_values(found)):
        if argument.why is None:
            return f"--{name} {_text(found)}: must be one of {', '.join(argument.accepted)}."
        parsed.lacks(name, f"{', '.join(others)} is not built: {', '.join(argument.accepted)} are")
    else:
        parsed.args[argument.dest] = value
    return None


_MEANING = {
    "int": "a whole number",
    "ints": "whole numbers",
    "float": "a number",
    "floats": "numbers",
    "pattern": "a whole number or a list such as ([0]*3+[1])*4",
}


def pattern(text: str) -> int | list[int]:
    """Evaluate an integer, or a list expression.

    The expression may have only sums and multiples, such as ([0]*3+[1])*4.

    Raises:
        ValueError: the text is another expression, or the list has more than `MOST_LISTED` entries.
        SyntaxError: the text is not a Python expression.
    """
    return _evaluated(ast.parse(text.strip(), mode="eval").body)


def _evaluated(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            made: list[Any] = [_evaluated(entry) for entry in entries]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _evaluated(left), _evaluated(right)
            made = one + other if isinstance(one, list) and isinstance(other, list) else [None]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            times, some = sorted((_evaluated(left), _evaluated(right)), key=lambda each: isinstance(each, list))
            is_legal = isinstance(times, int) and isinstance(some, list) and 0 <= times * len(some) <= MOST_LISTED
            made = list(some) * times if is_legal else [None]  # type: ignore[arg-type, operator]
        case _:
            made = [None]
    if len(made) > MOST_LISTED or not all(isinstance(each, int) for each in made):
        raise ValueError("no list of numbers, or one that is too long")
    return made


def _wrong_number(argument: Argument, found: list[str]) -> str | None:
    """Return the problem with the number of an argument's words; None if it is right."""
    most = 0 if argument.kind in SWITCHES else MOST_LISTED if argument.kind in LISTS else 1
    if not found and argument.kind not in (*SWITCHES, "any", "optional"):
        return f"--{argument.name} has no value: it needs one. It would take the next argument's, or fail."
    if len(found) > most:
        what = "it takes no value" if most == 0 else "it takes one value"
        more = _text(found[most:])
        return (
            f"--{argument.name} {_text(found)}: {what}. Remove {more}, or write two dashes before an argument's name."
        )
    return None


def _unknown(name: str) -> str:
    near = get_close_matches(name.replace("_", "-"), ARGUMENTS, n=1, cutoff=0.7)
    hint = f"Did you mean --{near[0]}?" if near else "Remove it"
    return (
        f"--{shown(name).strip(chr(39))}: Megatron-LM has no such argument, so what it does is unknown. {hint}"
        f"{'' if near else ','} {'Or' if near else 'or'} pass it over: --ignore {name}."
    )


def _text(words: Sequence[str]) -> str:
    return " ".join(words) or "nothing"


def flag(name: str) -> str:
    """Write an argument as it is typed, from its name in a table or its parsed value's name."""
    return f"--{name.replace('_', '-')}"
