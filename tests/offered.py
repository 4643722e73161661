"""The commands in the product's texts: lines that messages offer, names that they mention, examples of --help and of scripts."""

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from tests.documented import ROOT
from triaxis.engine.errors import TriaxisError
from triaxis.launch import cli
from triaxis.launch.start.command_line import CommandParser

HELPERS = ("triaxis", "install", "pip_install")
"""Functions of `engine/program.py` that build the lines of messages."""

OWNER = ROOT / "engine" / "program.py"
SCRIPTS = (
    ROOT / "launch" / "pretrain_gpt.sh",
    ROOT / "launch" / "bootstrap.sh",
    ROOT / "launch/slurm/pretrain_gpt.sbatch",
)


LOOKS_LIKE_A_LINE = re.compile(
    r"(?<![\w/.-])(?:triaxis [a-z-]+|bash \S*launch/\S*|(?:python3?|\{[^}]*\}) -m (?:pip|launch|tests)\b|pip install).*"
)


PROSE = (
    "bash {checkout}/launch/bootstrap.sh",
    "triaxis corpus 1",
    "triaxis bench --device on ",
    "triaxis bench --device, ",
    "triaxis bench starts its ranks",
    "triaxis plan: no device was used",
    "triaxis report from ",
)
"""Headings, sentences with the program as their subject, and one way to make an environment anew."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text of the product and its place; `{expression}` stands for what is filled in."""

    place: str
    text: str


@cache
def product() -> Sequence[tuple[str, Sequence[ast.AST]]]:
    """Return the nodes of each module that names a command, but of the one that builds the lines."""
    files = [path for top in ("engine", "models", "launch") for path in sorted((ROOT / top).rglob("*.py"))]
    return [
        (str(path.relative_to(ROOT)), list(ast.walk(ast.parse(text))))
        for path in files
        if path != OWNER and re.search(r"triaxis|install|launch/", text := path.read_text())
    ]


def form(node: ast.expr) -> str | None:
    """Return a literal text; None for any other expression."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            for part in node.values
            if isinstance(part, ast.Constant | ast.FormattedValue)
        )
    return None


def offers() -> Iterator[Text]:
    """Yield the lines that messages offer, such as `triaxis train {path}` or `install text`."""
    for file, nodes in product():
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in HELPERS:
                words = [form(argument) or f"{{{ast.unparse(argument)}}}" for argument in node.args]
                yield Text(f"{file}:{node.lineno}", " ".join([node.func.id, *words]))


def literals() -> Iterator[Text]:
    """Yield every other literal text: no docstrings, no examples, no usage, none that a helper turns into an offer."""
    for file, nodes in product():
        passed_over: set[int] = set()
        for node in nodes:
            if isinstance(node, ast.Expr):
                passed_over.add(id(node.value))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in HELPERS:
                passed_over |= {id(argument) for argument in node.args}
            elif isinstance(node, ast.Assign) and "usage" in ast.unparse(node.targets[0]):
                passed_over |= {id(part) for part in ast.walk(node.value)}
            elif isinstance(node, ast.JoinedStr):
                passed_over |= {id(part) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in passed_over:
                text = form(node) or ""
                if not text.startswith("examples:\n"):
                    yield Text(f"{file}:{node.lineno}", text)


def parsers() -> Iterator[CommandParser]:
    """Yield the parser of each command and verb."""
    for name in cli.COMMANDS:
        parser = cli.command_parser(cli.command_module(name))
        yield parser
        if parser.verbs:
            yield from parser._verbs.choices.values()


def examples() -> dict[str, str]:
    """Return the examples of all parsers: line -> where it is shown; and those in the heads of the scripts."""
    found: dict[str, str] = {}
    for parser in parsers():
        for line in (parser.epilog or "").splitlines():
            if match := re.search(r"(?:^|\s)((?:[A-Z_]+=\S+ |srun \S+ )*triaxis [a-z].*)", line):
                found.setdefault(match[1], f"{parser.prog} --help")
    for line in cli.EXAMPLES.splitlines():
        if line.startswith("  triaxis "):
            found.setdefault(line.strip(), "triaxis --help")
    for script in SCRIPTS:
        for line in script.read_text().splitlines():
            if match := re.match(r"# {2,}((?:[A-Z_]+=\S+ )*(?:bash|sbatch) .*?)(?:\s{2,}#.*| {5,}.*)?$", line):
                found.setdefault(match[1], str(script.relative_to(ROOT)))
    return found


def mentioned(text: str) -> Iterator[str]:
    """Yield what stands in backticks (or <code>) and begins with `triaxis`, and what looks like a command outside of them."""
    quoted = r"`([^`\n]+)`|<code>([^<\n]+)</code>"
    for match in re.finditer(quoted, text):
        inside = match[1] or match[2]
        if inside.startswith("triaxis "):
            yield f"`{inside}`"
    outside = re.sub(quoted, "", text)
    for match in LOOKS_LIKE_A_LINE.finditer(outside):
        yield match[0]


def parser_for(words: list[str]) -> tuple[CommandParser, list[str]]:
    """Return the parser that reads the words, and those that follow the names of command and verb."""
    assert words[0] in cli.COMMANDS, f"there is no command {words[0]!r}"
    parser, rest = cli.command_parser(cli.command_module(words[0])), words[1:]
    if rest and rest[0] in parser.verbs:
        return parser._verbs.choices[rest[0]], rest[1:]
    return parser, rest


PRINTED = re.compile(r"(?:^|(?<=[\s`/]))triaxis [a-z-]+(?=[ `\n]|$)[^\n`]*?(?=`|  |\n|$)")


def require_readable(output: str) -> None:
    """Assert that the program reads every line of its own that it has printed: command, verb, options, kinds of words."""
    for line in PRINTED.findall(output):
        if line.startswith(PROSE) or f"usage: {line}" in output:
            continue
        try:
            parser, rest = parser_for(shlex.split(line)[1:])
            if rest:
                parser.parse(rest)
        except (SystemExit, TriaxisError, ValueError, AssertionError) as error:
            raise AssertionError(f"the output offers {line!r}, which the program refuses") from error
