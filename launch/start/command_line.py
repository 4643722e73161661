"""Parse the words of a command line, in the same way for every command.

    triaxis footprint configs/gpt_tiny.yaml --full parallel.dp=null --gpus 8
                      |                     |      |                `- an option with its value
                      |                     |      `- an override
                      |                     `- an option
                      `- the config, or a checkpoint for the commands that read one

Words and options may come in any order. `CommandParser.parse` sorts them into `args.config` and `args.overrides`.
"""

import argparse
import difflib
import json
import os
import re
import sys
import textwrap
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from triaxis.engine.config.shipped import config_path, nearest_names
from triaxis.engine.errors import ConfigError, TriaxisError, brief, shown
from triaxis.engine.layout.rank_rules import MOST_RANKS
from triaxis.engine.storage.elsewhere import as_typed, how_to_bring, why_no_path
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.redaction import unwritable
from triaxis.engine.storage.state_files import kind_of

OVERRIDES = "section.key=value"
EXAMPLES = "examples:\n"
"""Heading above the examples, which follow the options."""
BLANK = "\n\n"
HELP_COLUMN = 27
"""Column where the option descriptions in `--help` begin."""
HELP_WIDTH = 80
"""Width of `--help` in columns, including the examples."""


OVERRIDE = re.compile(r"[^/=]+=")
"""Start of a word that is taken for an override, and never looked up as a path, whatever its length."""
ADDRESS = re.compile(r"\w+:/")
PATHS = ("FILE", "FILE|NxGPU", "PREFIX")
"""Metavars in `--help` for options that take a path; other path options have the type Path."""

RENAMED_OPTIONS = {"--page": "--output"}
"""Options renamed before the first release whose new name is not similar enough to be suggested."""

LAYOUT_WORDS = {
    "tp": "tp",
    "cp": "cp",
    "pp": "pp",
    "vpp": "vpp",
    "dp": "dp",
    "ep": "ep",
    "etp": "etp",
    "sp": "sequence_parallel",
}
"""Layout words, and the keys of the section `parallel` that they set."""


@dataclass(frozen=True, slots=True)
class PathArgument:
    """The file or folder that a command works on, given as a word.

    Attributes:
        name: name of the word in usages, and of the parsed attribute that holds the path.
        exists: function (path) -> whether it is an existing file or folder of this kind.
        endings: a word with such an ending is a path even if the file is missing; opening it reports that.
        example: example for the error message if none is given.
    """

    name: str
    exists: Callable[[Path], bool]
    endings: tuple[str, ...]
    example: str


CONFIG = PathArgument("config", os.path.isfile, (".yaml", ".yml"), "configs/gpt_tiny.yaml")
CHECKPOINT = PathArgument("checkpoint", os.path.exists, (), "runs/gpt_tiny")


class CommandParser(argparse.ArgumentParser):
    """A parser for one command or verb, with options and words in any order.

    Attributes:
        renamed: new name of each verb renamed before the first release, for the error about the old name.
    """

    def __init__(self, **settings: Any) -> None:
        # An abbreviated option would break as soon as another option begins with the same letters.
        super().__init__(formatter_class=_Help, allow_abbrev=False, **settings)
        self._subject: PathArgument | None = None
        self._needs_subject = False
        self._read_without: Path | None = None
        self._verbs: Any = None
        self.renamed: Mapping[str, str] = {}

    def add_verb(self, name: str, summary: str, words: str, examples: str) -> "CommandParser":
        """Add a verb that has the option `--json`, and return the verb's parser.

        Args:
            summary: description of the verb, for the command's `--help` and the verb's.
            words: usage text that follows the verb's name.
            examples: text below the verb's options; the command's help shows the part before the first empty line.
        """
        if self._verbs is None:
            self._verbs = self.add_subparsers(dest="verb", metavar="VERB", required=True)
            self.usage, self.epilog = f"{self.prog} VERB ...", EXAMPLES
        self.epilog = f"{self.epilog}{examples.removeprefix(EXAMPLES).partition(BLANK)[0].rstrip()}\n"
        description = f"{summary[0].upper()}{summary[1:]}."
        verb: CommandParser = self._verbs.add_parser(name, help=summary, description=description, epilog=examples)
        verb.usage = f"{self.prog} {name} {words}"
        add_json(verb)
        return verb

    def takes(
        self, subject: PathArgument, meaning: str, *, required: bool = True, read_without: Path | None = None
    ) -> None:
        """Make the parser accept config overrides, and one path, the subject, besides options.

        Args:
            subject: kind of path, `CONFIG` or `CHECKPOINT`. A config may also be given with `--config`.
            meaning: what the subject means for this command, for `--help`.
            required: refuse a command line that lacks it.
            read_without: path that the command reads if none is given; None: nothing is read.
        """
        self._subject, self._needs_subject, self._read_without = subject, required, read_without
        entries = (
            (subject.name.upper(), meaning),
            (OVERRIDES, "a field of the configuration, in place of what it says"),
        )
        described = "\n".join(_entry(name, text) for name, text in entries)
        # argparse sees one argument; --help shows two, above the options.
        self._positionals.title, self._positionals.description = "words", described
        self.add_argument("words", nargs="*", help=argparse.SUPPRESS)
        if subject is CONFIG:
            self.add_argument(
                "--config", type=config_path, metavar="FILE", help="the config, in place of the first word"
            )

    @property
    def verbs(self) -> tuple[str, ...]:
        """Names of the verbs (subcommands), if the command has any."""
        return () if self._verbs is None else tuple(self._verbs.choices)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the words after the command's name. An unknown option or verb exits with a usage error.

        Raises:
            ConfigError: a word is not an option, an override or the command's config or checkpoint, or is another engine's option.
            ConfigError: a path cannot exist here, an output cannot be written, or a required config or checkpoint is missing.
        """
        if self._verbs is not None:
            return self._parse_verb(arguments)
        parsed, strangers = self.parse_known_intermixed_args(arguments)
        if unknown := [word for word in strangers if word.startswith("-")] or strangers:
            if self._subject is CONFIG:
                from triaxis.launch.start.foreign_options import answers

                refuse(answers(self.prog, arguments, unknown, self.parse, self._read_without))
            self.error("; ".join(f"unknown option {word}{_nearest(word, self._options())}" for word in unknown))
        refuse(self._bad_paths(parsed))
        if self._subject is not None:
            self._sort_words(parsed, self._subject)
        return parsed

    def _bad_paths(self, parsed: argparse.Namespace) -> Iterator[str]:
        """Yield a problem for each path that is a remote address or too long.

        Also yield a problem for each `--output` that names a device, and for each `--output FILE` whose folder does not exist.
        Permissions are not checked.
        """
        for action in self._actions:
            given = getattr(parsed, action.dest, None)
            if action.type is Path or action.metavar in PATHS:
                for path in given if isinstance(given, list) else [given]:
                    if path is not None and (why := why_no_path(path)):
                        yield f"{brief(as_typed(path))}: {why}"
                    elif path is not None and action.dest == "output":
                        yield from _unwritable_place(Path(path), action.metavar == "FILE")

    def _options(self) -> list[str]:
        return list(self._option_string_actions)

    def _parse_verb(self, arguments: Sequence[str]) -> argparse.Namespace:
        verb = arguments[0] if arguments else None
        if verb in self.verbs:
            parsed: argparse.Namespace = self._verbs.choices[verb].parse(arguments[1:])
            setattr(parsed, self._verbs.dest, verb)
            return parsed
        if verb is not None and verb in self.renamed:
            self.error(f"unknown verb {verb!r}: it is now {self.renamed[verb]}")
        if verb is not None and not verb.startswith("-"):
            self.error(f"unknown verb {verb!r}; choose from {', '.join(self.verbs)}{_nearest(verb, self.verbs)}")
        return self.parse_args(arguments)  # --help, or argparse's message that there is no verb

    def _sort_words(self, parsed: argparse.Namespace, subject: PathArgument) -> None:
        paths, overrides, problems = [], [], []
        named = getattr(parsed, subject.name, None)
        for word in parsed.words:
            if OVERRIDE.match(word):
                overrides.append(word)
                continue
            if ADDRESS.match(word):
                problems.append(f"{word}:{how_to_bring(word)}")
                continue
            path = config_path(word) if subject is CONFIG else Path(word)
            if subject.exists(path) or ("=" not in word and ("/" in word or path.suffix in subject.endings)):
                paths.append(path)
            elif "=" in word:
                overrides.append(word)
            else:
                problems.append(_stray(word, subject, self._options()))
        paths += [] if named is None or named in paths else [named]
        if len(paths) > 1:
            shown = " and ".join(map(str, paths))
            problems.append(f"{shown}: only one {subject.name} can be given. Remove one.")
        if not paths and not problems and self._needs_subject:
            problems.append(
                f"no {subject.name} given. Pass it as the first word, for example {self.prog} {subject.example}"
            )
        refuse(problems)
        del parsed.words
        setattr(parsed, subject.name, paths[0] if paths else None)
        parsed.overrides = overrides


def add_world_size(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add `--world-size N`, alias `--gpus N`, the number of ranks if `parallel.dp` is null."""
    parser.add_argument("--world-size", "--gpus", type=int, metavar="N", help=meaning)


def add_checkpoint(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the positional argument `name`, a path that `triaxis.engine.checkpoint.directory.find` accepts."""
    parser.add_argument(
        name, type=Path, metavar="CHECKPOINT", help="step_00001000, a folder of checkpoints, or a run directory"
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add `--weights`, which selects the weights to read (`triaxis.engine.checkpoint.inspect.weights.WhichWeights`)."""
    parser.add_argument(
        "--weights",
        choices=("trained", "ema"),
        default="trained",
        help="ema: their moving average, where the run had optimizer.ema (default: trained)",
    )


def add_weights_only(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add `--weights-only`, which leaves out a Megatron-Core checkpoint's optimizer state and iteration."""
    parser.add_argument(
        "--weights-only", action="store_true", help="leave the optimizer's state and the iteration behind"
    )


def add_dry_run(parser: argparse.ArgumentParser, meaning: str = "print the launch line; start nothing") -> None:
    """Add `--dry-run`, with the help text `meaning`. The command itself must obey it."""
    parser.add_argument("--dry-run", action="store_true", help=meaning)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, for commands that call `print_json`."""
    parser.add_argument("--json", action="store_true", help="print JSON for scripts; text goes to standard error")
    parser.set_defaults(text_goes_aside=True)


@contextmanager
def text_aside(args: argparse.Namespace) -> Iterator[None]:
    """Send text to standard error if `--json` was typed, so that standard output is left to `print_json`."""
    args.json_output = sys.stdout
    aside = getattr(args, "text_goes_aside", False) and args.json
    with redirect_stdout(sys.stderr) if aside else nullcontext():
        yield


def print_json(args: argparse.Namespace, tree: object, file: Path | None = None) -> None:
    """Print a command's result as JSON if `--json` was typed. If a file is named, write the JSON to it too."""
    text = json.dumps(tree, indent=2)
    if args.json:
        print(text, file=args.json_output, flush=True)
    if file is not None:
        write_output(file, f"{text}\n")


def write_output(file: Path, text: str) -> None:
    """Write the file that an option names. Raises OutputError if that fails."""
    try:
        write_atomically(file, [text.encode()])
    except OSError as error:
        raise unwritable(f"{file}", error) from error


def add_output(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, meaning: str = "write all of it there as JSON"
) -> None:
    """Add `--output FILE`, with the help text `meaning`. `parse` checks the path; the command itself writes there."""
    parser.add_argument("--output", type=Path, metavar="FILE", help=meaning)


def add_open(parser: argparse.ArgumentParser) -> None:
    """Add `--open`, for commands that call `open_page`."""
    parser.add_argument("--open", action="store_true", help="open it in the browser")


def open_page(args: argparse.Namespace, path: Path) -> None:
    """Open a finished page or picture if `--open` was typed.

    Raises:
        TriaxisError: this machine has no browser.
    """
    if args.open and not webbrowser.open(path.resolve().as_uri()):
        raise TriaxisError(f"{path} is written, but this machine has no browser. Copy it to one that has.")


def add_ignore(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add `--ignore KEY`, which accepts an unknown key in a Hugging Face config.json."""
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="KEY",
        help="let a key of config.json through that is not known here, if it does not change the model; may be repeated",
    )


def typed(args: argparse.Namespace, *names: str) -> list[str]:
    """List which of the options `names` were typed, spelled as on the command line.

    Args:
        args: parsed arguments; an option that was not typed is None, False or an empty list.
        names: option names, with `_` for `-`.
    """
    given = ((name, getattr(args, name)) for name in names)
    return [_option(name) for name, value in given if not (value is None or value is False or value == [])]


def _option(name: str) -> str:
    """Spell an option as help texts do, such as `--max-steps` for `max_steps`."""
    return "--gpus" if name == "world_size" else f"--{name.replace('_', '-')}"


def above(name: str, number: int, most: int, reason: str) -> list[str]:
    """Return a list with a message if an option's number exceeds `most`, else an empty list.

    Args:
        name: option name, with `_` for `-`.
        number: the option's value.
        most: largest legal value.
        reason: reason for the bound, which ends the message.
    """
    if number <= most:
        return []
    return [f"{_option(name)} {shown(number)}: must be at most {most:,}; {reason}."]


def refuse(problems: Iterable[str], source: str = "the command line") -> None:
    """Raise a ConfigError that lists the problems with `source`, if there are any."""
    if found := list(problems):
        raise ConfigError(found, source)


def check_counts(**given: int | None) -> None:
    """Refuse options that count ranks and are below 1 or above `MOST_RANKS`.

    Args:
        given: counts by option name, with `_` for `-`; None: the option was not given.

    Raises:
        ConfigError: all problems at once.
    """
    problems = [
        f"{_option(name)} {number}: must be at least 1, or there is nothing to do."
        for name, number in given.items()
        if number is not None and number < 1
    ]
    for name, number in given.items():
        if number is not None:
            problems += above(
                name, number, MOST_RANKS, "no run has more ranks, and their groups would not fit in memory"
            )
    refuse(problems)


def layout_overrides(text: str, *, dp_is_open: bool = False) -> list[str]:
    """Convert `tp=4,pp=2` to overrides of the section `parallel`.

    Args:
        text: sizes by name; unnamed sizes are 1, and `sp` is off.
        dp_is_open: if `dp` is not named, leave it to the world size.

    Raises:
        ConfigError: a word is not a size, or occurs twice.
    """
    given: dict[str, str] = {}
    problems = []
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        if name not in LAYOUT_WORDS or not value or name in given:
            problems.append(
                f"layout {text}: {word!r} is not one of {', '.join(f'{name}=..' for name in LAYOUT_WORDS)}, each at most once; the "
                "layout that would be run is not the one that was meant. Write for example tp=2,pp=2,vpp=2,dp=2."
            )
        given[name] = value
    refuse(problems)
    unnamed = {"sp": "false"} | ({"dp": "null"} if dp_is_open else {})
    sizes = {name: given.get(name, unnamed.get(name, "1")) for name in LAYOUT_WORDS}
    return [f"parallel.{LAYOUT_WORDS[name]}={value}" for name, value in sizes.items()]


def near(word: str, names: Iterable[str]) -> str | None:
    """Return the name that `word` probably misspells, or None."""
    by_letters = {name.lstrip("-"): name for name in names}
    found = difflib.get_close_matches(word.lstrip("-").partition("=")[0], by_letters, n=1)
    return by_letters[found[0]] if found else None


def _nearest(word: str, names: Iterable[str]) -> str:
    name = near(RENAMED_OPTIONS.get(word, word), names)
    return "" if name is None else f". Did you mean {name}?"


def _stray(word: str, subject: PathArgument, options: Iterable[str]) -> str:
    names = nearest_names(word) if subject is CONFIG else []
    option = near(word, options)
    hint = " or ".join(names) or ("--output" if word.endswith(".json") and "--output" in options else option)
    return (
        f"{word!r} is not an existing {subject.name}, an override ({OVERRIDES}, such as train.steps=20) or an option "
        "(--help lists them), so it would be ignored." + ("" if hint is None else f" Did you mean {hint}?")
    )


def _unwritable_place(path: Path, is_file: bool) -> Iterator[str]:
    """Yield the problem if an output path is a device, or if its folder does not exist."""
    if path.parent == Path("/dev") or (path.exists() and not (path.is_file() or path.is_dir())):
        what = kind_of(path.stat().st_mode) if path.exists() else "no file"
        yield f"{path} is {what}, and a file would take its place. Name a file; without --output the terminal shows it."
    elif is_file and not path.parent.is_dir():
        yield f"{path} cannot be written: there is no folder {path.parent}. The work would be lost. Make it, or name another."


def _entry(name: str, text: str) -> str:
    """Format a word and its meaning as argparse formats an option."""
    return textwrap.fill(
        text, HELP_WIDTH - 2, initial_indent=f"{name:<{HELP_COLUMN - 2}}", subsequent_indent=" " * (HELP_COLUMN - 2)
    )


class _Help(argparse.HelpFormatter):
    """A help formatter that keeps columns and examples, and folds lines wider than `HELP_WIDTH`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=HELP_COLUMN, width=HELP_WIDTH)
        self._action_max_length = HELP_COLUMN - 2

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for is_kept, group in groupby(text.splitlines(), key=_is_kept):
            if is_kept:
                lines += [line for long in group for line in folded(long, HELP_WIDTH - len(indent))]
            else:
                lines += textwrap.wrap(" ".join(group), HELP_WIDTH - len(indent), break_on_hyphens=False)
        return "\n".join(f"{indent}{line}" for line in lines)

    def _format_usage(self, usage: str | None, *others: Any) -> str:
        text = super()._format_usage(usage, *others)
        if usage is None:
            return text
        whole = re.sub(r"\[[^]]*\]", lambda match: match[0].replace(" ", "\0"), text.strip())
        lines = textwrap.wrap(whole, HELP_WIDTH, subsequent_indent=" " * 9, break_on_hyphens=False)
        return "\n".join(lines).replace("\0", " ") + "\n\n"


def _is_kept(line: str) -> bool:
    """Whether a help line is not joined with its neighbours: an example, a heading, a column row or an empty line."""
    return not line or line.startswith(" ") or line.endswith(":") or "  " in line


def folded(line: str, width: int) -> list[str]:
    """Split an example command wider than `width` into lines that a shell reads as one command."""
    if len(line) <= width or not line.startswith("  "):
        return [line]
    words = re.findall(r"(?:'[^']*'|\S)+", line)
    lines = [f"  {words[0]}"]
    for place, word in enumerate(words[1:], start=1):
        # An option stays with its value.
        value = words[place + 1 : place + 2] if word.startswith("-") else []
        rest = " ".join([word, *(one for one in value if not one.startswith("-"))])
        if len(lines[-1]) + len(rest) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"      {word}")
        else:
            lines[-1] += f" {word}"
    return lines
