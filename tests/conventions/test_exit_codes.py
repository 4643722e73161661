"""Exit codes have one owner, `triaxis.engine.errors.ExitCode`: nothing else writes one of their numbers where a process ends."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from triaxis.engine.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
OWNER = ROOT / "engine/errors.py"
ENDS = {"exit", "_exit", "end", "leave", "_leave", "SystemExit"}
"""Names of functions and exceptions that end a process with a code."""

OWNED = {int(code) for code in ExitCode} - {ExitCode.BROKE}
"""Numbers that mean one thing. 1 is also the answer of a command that compares."""


def _is_owned(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value in OWNED


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def written_codes(source: str) -> Iterator[int]:
    """Yield the lines in which a number stands for an exit code."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=called, args=[first, *_]) if _name(called) in ENDS and _is_owned(first):
                yield node.lineno
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value) if _name(
                target
            ).endswith("exit_code") and _is_owned(value):
                yield node.lineno
            case ast.Compare(left=left, comparators=others) if any("exit" in _name(each) for each in (left, *others)):
                if any(_is_owned(each) for each in (left, *others)):
                    yield node.lineno
            case ast.FunctionDef(name="main" | "run"):
                yield from (
                    each.lineno for each in ast.walk(node) if isinstance(each, ast.Return) and _is_owned(each.value)
                )
            case ast.Constant(value=75 | 130 as value) if type(value) is int:
                yield node.lineno


def test_no_number_stands_for_an_exit_code() -> None:
    paths = [path for top in ("engine", "models", "launch") for path in sorted((ROOT / top).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in paths
        if path != OWNER
        for line in written_codes(path.read_text())
    ]
    assert OWNER in paths and not found, f"use engine.errors.ExitCode: {found}"


@pytest.mark.parametrize(
    "source",
    [
        "os._exit(130)",
        "sys.exit(2)",
        "class E(TriaxisError):\n    exit_code = 5",
        "if failure.exit_code == 4: pass",
        "def main(argv):\n    return 2",
        "REQUEUE = 75",
    ],
)
def test_a_number_is_found(source: str) -> None:
    assert list(written_codes(source))


def test_other_numbers_are_not_exit_codes() -> None:
    assert not list(written_codes("def main(argv):\n    return 1 if argv else 0\n\ndef size():\n    return 2\n"))
