"""Parse a Megatron-LM command line, and sort its arguments by their meaning here.

torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --bf16 --log-throughput --fp8-format hybrid
                                           |                      |                `- no counterpart: refused, or ignored
         the launcher's, left out          `- read: args          `- without effect here
"""

import ast
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from triaxis.engine.errors import ConfigError, brief, shown
from triaxis.engine.storage.elsewhere import why_no_path
from triaxis.engine.storage.state_files import read_text
from triaxis.models.interop.megatron.command_line.flags import FLAGS, MANY, SWITCHES, Flag
from triaxis.models.interop.megatron.command_line.no_counterpart import NO_COUNTERPART, Arity, Missing
from triaxis.models.interop.megatron.command_line.without_effect import WITHOUT_EFFECT

MOST_LISTED = 10_000
"""Maximum number of list entries that an expression may produce."""

_PASSED_OVER: Mapping[str, tuple[str, Arity]] = {
    word.rstrip("=+?"): (topic, word[-1] if word[-1] in "=+?" else "")  # type: ignore[misc]
    for topic, words in WITHOUT_EFFECT.items()
    for word in words.split()
}
"""Argument without effect here -> (topic, arity)."""


@dataclass
class Parsed:
    """Parsed Megatron-LM command line.

    Attributes:
        args: values of all supported arguments, by `Flag.dest`, as Megatron-LM's parser would set them, defaults included.
        given: names of the arguments that were given, without leading dashes, in order.
        without_effect: topic -> names of given arguments that have no effect here.
        missing: name of an argument -> why its feature has no counterpart here.
        read: names of given arguments that are supported here.
        problems: problems with the command line, as sentences.
    """

    args: dict[str, Any]
    given: list[str] = field(default_factory=list)
    without_effect: dict[str, list[str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def lacks(self, name: str, why: str) -> None:
        """Record why a feature has no counterpart here. The argument `name` switches the feature on. The first reason stays."""
        self.missing.setdefault(name, why)


def is_argument(name: str) -> bool:
    """Whether Megatron-LM has an argument with this name, given without leading dashes."""
    return name in FLAGS or name in _PASSED_OVER or name in NO_COUNTERPART


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
        ignored: argument names without leading dashes. Unknown arguments among these are skipped with all their values. If a known
            one has no effect or counterpart here, its number of values is not checked.
    """
    parsed = Parsed({flag.dest: flag.default for flag in FLAGS.values()})
    values: dict[str, list[str]] = {}
    for name, found in _by_name(_without_launcher(words), parsed.problems):
        if name in values and values[name] != found:
            parsed.problems.append(
                f"--{name} is given twice, with {_text(values[name])} and {_text(found)}: Megatron-LM takes the last. Remove one."
            )
        values[name] = found
    parsed.given = list(values)
    for name, found in values.items():
        if unfilled := [value for value in found if "$" in value]:
            parsed.problems.append(
                f"--{name} {unfilled[0]}: a shell variable that was not filled in. Give its value: `echo` prints the line as the "
                "shell makes it."
            )
        elif (flag := FLAGS.get(name)) is not None:
            parsed.read.add(name)
            _read(flag, found, parsed)
        elif name in _PASSED_OVER:
            topic, arity = _PASSED_OVER[name]
            parsed.without_effect.setdefault(topic, []).append(name)
            parsed.problems += [] if name in ignored else _wrong_number(name, arity, found)
        elif (missing := NO_COUNTERPART.get(name)) is not None:
            # A line printed by a script has lost the quotes around a value with several words.
            parsed.problems += [] if name in ignored else _wrong_number(name, missing.arity, found)
            if not _is_off(missing, found):
                parsed.lacks(name, missing.why)
        elif name not in ignored:
            parsed.problems.append(_unknown(name))
    return parsed


def _split(text: str, source: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError([f"it cannot be split into words: {error}. Balance its quotes."], source) from error


def _without_launcher(words: Sequence[str]) -> Sequence[str]:
    """Drop the words up to and including the first .py word, if no supported argument precedes it."""
    script = next(
        (place for place, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")), None
    )
    known = next((place for place, word in enumerate(words) if word.removeprefix("--") in FLAGS), len(words))
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


def _read(flag: Flag, found: list[str], parsed: Parsed) -> None:
    """Store a supported argument's value in `parsed.args`, or add a problem."""
    arity: Arity = "" if flag.kind in SWITCHES else "+" if flag.kind in MANY else "="
    if wrong := _wrong_number(flag.name, arity, found):
        parsed.problems += wrong
        return
    try:
        parsed.args[flag.dest] = _value(flag, found)
    except (ValueError, SyntaxError):
        parsed.problems.append(f"--{flag.name} {_text(found)}: must be {_MEANING[flag.kind]}.")


_MEANING = {
    "int": "a whole number",
    "ints": "whole numbers",
    "float": "a number",
    "floats": "numbers",
    "pattern": "a whole number or a list such as ([0]*3+[1])*4",
}


def _value(flag: Flag, found: list[str]) -> Any:
    match flag.kind:
        case "switch" | "off":
            return flag.kind == "switch"
        case "int":
            return int(found[0])
        case "float":
            return float(found[0])
        case "ints":
            return [int(word) for word in found]
        case "floats":
            return [float(word) for word in found]
        case "strs":
            return found
        case "pattern":
            return pattern(found[0])
        case _:
            return found[0]


def pattern(text: str) -> int | list[int]:
    """Evaluate an integer, or a list expression.

    The expression may have only sums and multiples, such as ([0]*3+[1])*4.

    Raises:
        ValueError: the text is another expression, or the list has more than `MOST_LISTED` entries.
        SyntaxError: the text is not a Python expression.
    """
    made: int | list[int] = _evaluated(ast.parse(text.strip(), mode="eval").body)
    return made


def _evaluated(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            made = [_evaluated(entry) for entry in entries]
            if not all(isinstance(entry, int) for entry in made):
                raise ValueError("a list in a list")
            return made
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operator, right=right):
            one, other = _evaluated(left), _evaluated(right)
            if isinstance(operator, ast.Add) and isinstance(one, list) and isinstance(other, list):
                made = one + other
            elif isinstance(operator, ast.Mult) and isinstance(one, list) != isinstance(other, list):
                entries, times = (one, other) if isinstance(one, list) else (other, one)
                if not 0 <= times * len(entries) <= MOST_LISTED:
                    raise ValueError("a list that is too long")
                made = entries * times
            else:
                raise ValueError("no sum of lists and no multiple of one")
            if len(made) > MOST_LISTED:
                raise ValueError("a list that is too long")
            return made
    raise ValueError("no list")


def _wrong_number(name: str, arity: Arity, found: list[str]) -> list[str]:
    least, most = {"": (0, 0), "=": (1, 1), "+": (0 if name not in FLAGS else 1, MOST_LISTED), "?": (0, 1)}[arity]
    if len(found) < least:
        return [f"--{name} has no value: it needs one. It would take the next argument's, or fail."]
    if len(found) > most:
        what = "it takes no value" if most == 0 else "it takes one value"
        return [
            f"--{name} {_text(found)}: {what}. Remove {_text(found[most:])}, or write two dashes before an argument's name."
        ]
    return []


def _is_off(missing: Missing, found: list[str]) -> bool:
    """Whether the given values leave the argument's feature off."""
    if len(found) != 1 or not missing.off:
        return False
    numbers = [value for value in missing.off if not isinstance(value, str | bool)]
    try:
        return found[0] in missing.off or float(found[0]) in numbers
    except ValueError:
        return False


def _unknown(name: str) -> str:
    known = (*FLAGS, *_PASSED_OVER, *NO_COUNTERPART)
    near = get_close_matches(name.replace("_", "-"), known, n=1, cutoff=0.7)
    hint = f"Did you mean --{near[0]}?" if near else "Remove it"
    return (
        f"--{shown(name).strip(chr(39))}: Megatron-LM has no such argument, so what it does is unknown. {hint}"
        f"{'' if near else ','} {'Or' if near else 'or'} pass it over: --ignore {name}."
    )


def _text(words: Sequence[str]) -> str:
    return " ".join(words) or "nothing"
