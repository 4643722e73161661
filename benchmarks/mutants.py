"""Mutants: how many one-line mistakes in the product do the tests notice?

    python -m benchmarks.mutants draw                        # the drawn mutants, a line each
    python -m benchmarks.mutants trace traced.json           # run the CI tier once: which tests execute which mutant's line
    python -m benchmarks.mutants run traced.json kills.json  # each mutant against the tests that execute its line

A mutant changes one expression on one line: a comparison, an operator, a constant, a `not`, or a call that stands by itself and is
left out. They are drawn from `engine/` and `models/gpt/` of the last commit by a seed, before anyone knows which tests notice them.
Mutants and probes are planted in clones, never in the checkout. Tests of conventions are left out: they read sources and run none.
"""

import argparse
import ast
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("engine", "models/gpt")
SEED = 57
COUNT = 40
LIMIT_SECONDS = 1800
"""Of one mutant. A mutant that makes tests hang is noticed."""

FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}

PROBE = """
import os
from pathlib import Path

worker = os.environ.get("MUTANT_WORKER", "none")
folder = Path(os.environ.get("MUTANT_PROBES", "none"))
seen = set()


def hit(number):
    # A rank or a command has the variables of its start, or of its fork server's; it asks once which test is running.
    is_worker = worker == str(os.getpid())
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0] if is_worker else str(os.getpid())
    if (number, test) in seen or not (folder / f"{worker}.current").exists():
        return
    seen.add((number, test))
    with open(folder / f"hits.{os.getpid()}", "a") as out:
        out.write(f"{number} {test if is_worker else (folder / (worker + '.current')).read_text()}\\n")
"""
"""Notes which test is running where a mutant would be."""

PLUGIN = """
import os
from pathlib import Path

import pytest


def pytest_configure(config):
    os.environ["MUTANT_WORKER"] = str(os.getpid())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid, location):
    Path(os.environ["MUTANT_PROBES"], f"{os.getpid()}.current").write_text(nodeid)
"""


@dataclass(frozen=True)
class Mutant:
    """Bytes [start, stop) of one line of a file, and what stands there instead.

    Attributes:
        file: its path in the repository.
        line: its number, from 1.
    """

    file: str
    line: int
    start: int
    stop: int
    instead: str

    def source(self, text: bytes, instead: bytes) -> bytes:
        """Return the file's text with `instead` in the mutant's place."""
        lines = text.split(b"\n")
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + instead + line[self.stop :]
        return b"\n".join(lines)

    def old(self, text: bytes) -> bytes:
        """Return the expression that it replaces."""
        return text.split(b"\n")[self.line - 1][self.start : self.stop]

    def plant(self, root: Path) -> None:
        """Write it into the checkout at `root`."""
        path = root / self.file
        path.write_bytes(self.source(path.read_bytes(), self.instead.encode()))

    def describe(self, root: Path = ROOT) -> str:
        """Return a line: the place, what stood there, and what stands there now."""
        return f"{self.file}:{self.line}: {self.old((root / self.file).read_bytes()).decode()} -> {self.instead}"


def mutants_of(source: str, file: str) -> list[Mutant]:
    """Return every mutant of a module, in the order of its lines.

    Annotations, decorators, f-strings and the messages of errors have none.
    """
    found = []
    for node, text in _changes(ast.parse(source)):
        if node.lineno == node.end_lineno and node.end_col_offset is not None:
            found.append(Mutant(file, node.lineno, node.col_offset, node.end_col_offset, text))
    return sorted(found, key=lambda one: (one.line, one.start, one.stop))


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node.value, "None"
    elif isinstance(node, ast.expr):
        text = _instead(node)
        if text is not None:
            yield node, text
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert):
                yield from _changes(child)


def _instead(node: ast.expr) -> str | None:
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in FLIPPED:
            changed.ops = [FLIPPED[type(operator)]()]  # type: ignore[list-item]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in FLIPPED:
            changed.op = FLIPPED[type(operator)]()  # type: ignore[assignment]
        case ast.UnaryOp(op=ast.Not()):
            changed = changed.operand
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value)):
            return str(value + 1)
        case _:
            return None
    return f"({ast.unparse(changed)})"


def draw(root: Path = ROOT, seed: int = SEED, count: int = COUNT) -> list[Mutant]:
    """Draw lines of the checkout at `root`, and a mutant of each; the same source and seed give the same ones."""
    by_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for place in PLACES:
        for path in sorted((root / place).rglob("*.py")):
            for mutant in mutants_of(path.read_text(), str(path.relative_to(root))):
                by_line[mutant.file, mutant.line].append(mutant)
    chosen = random.Random(seed)
    return [chosen.choice(by_line[line]) for line in chosen.sample(sorted(by_line), count)]


def trace(mutants: Sequence[Mutant], out: Path, arguments: Sequence[str]) -> None:
    """Run the tests once with a probe at each mutant's expression; write which tests come past each."""
    with tempfile.TemporaryDirectory(prefix="triaxis-mutants-") as folder:
        clone = _clone(Path(folder, "clone"))
        for number, mutant in enumerate(mutants):
            path = clone / mutant.file
            text = path.read_bytes()
            probe = f"(__import__('triaxis.engine.mutant_probe', fromlist=['hit']).hit({number}) or "
            path.write_bytes(mutant.source(text, probe.encode() + mutant.old(text) + b")"))
        (clone / "engine/mutant_probe.py").write_text(PROBE)
        (clone / "tests/plugins/mutant_plugin.py").write_text(PLUGIN)
        probes = Path(folder, "probes")
        probes.mkdir()
        _pytest(clone, ["-p", "mutant_plugin", *arguments], {"MUTANT_PROBES": str(probes)}, limit_seconds=None)
        tests: dict[int, set[str]] = defaultdict(set)
        for file in probes.glob("hits.*"):
            for line in file.read_text().splitlines():
                number, _, test = line.partition(" ")
                tests[int(number)].add(test)
    rows = [
        {"mutant": mutant.describe(), "tests": sorted(one for one in tests[number] if "tests/conventions" not in one)}
        for number, mutant in enumerate(mutants)
    ]
    out.write_text(json.dumps(rows, indent=1))
    for row in rows:
        print(f"{len(row['tests']):6,} tests  {row['mutant']}")


def run(mutants: Sequence[Mutant], traced: Path, out: Path) -> None:
    """Run each mutant against the tests that execute its line, until the first that fails; write which one it was.

    What `out` has already is kept, so that a run can be cut off and go on.
    """
    rows = {row["mutant"]: row["tests"] for row in json.loads(traced.read_text())}
    killed: dict[str, str | None] = json.loads(out.read_text()) if out.exists() else {}
    for mutant in mutants:
        name = mutant.describe()
        if name not in killed:
            killed[name] = _first_failure(mutant, rows[name]) if rows[name] else None
            out.write_text(json.dumps(killed, indent=1))
        print(f"{'noticed' if killed[name] else 'MISSED':8} {name}  {killed[name] or ''}", flush=True)
    print(f"{sum(map(bool, killed.values()))} of {len(killed)} mutants are noticed")


def _first_failure(mutant: Mutant, tests: Sequence[str]) -> str | None:
    with tempfile.TemporaryDirectory(prefix="triaxis-mutants-") as folder:
        clone = _clone(Path(folder, "clone"))
        mutant.plant(clone)
        listed = Path(folder, "tests")
        # Tests near the mutant first: they are the fastest that notice it.
        near = mutant.file.removesuffix(".py").split("/")
        listed.write_text("\n".join(sorted(tests, key=lambda test: -_shared(near, test.split("/")[1:]))))
        try:
            output = _pytest(clone, ["-x", "-q", "-rfE", "--no-header", f"@{listed}"], {}, LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"hung for {LIMIT_SECONDS} s"
    # Of a test: `ERROR: not found` is of a name that pytest did not find, and no test has noticed anything.
    failed = [line for line in output.splitlines() if line.startswith(("FAILED tests/", "ERROR tests/"))]
    return failed[0].split(" - ")[0] if failed else None


def _shared(first: Sequence[str], second: Sequence[str]) -> int:
    return next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))


def _clone(to: Path) -> Path:
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(to)], check=True)
    return to


def _pytest(clone: Path, arguments: Sequence[str], variables: dict[str, str], limit_seconds: float | None) -> str:
    command = ["bash", "tests/run.sh", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"TRIAXIS_PYTHON": sys.executable} | variables
    with subprocess.Popen(
        command, cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            return process.communicate(timeout=limit_seconds)[0]
        except subprocess.TimeoutExpired:
            process.terminate()
            raise


def main(argv: Sequence[str] | None = None) -> None:
    """Draw, trace or run mutants."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("draw", "trace", "run"))
    parser.add_argument("files", nargs="*", type=Path, help="trace: the file to write; run: that file, and its own")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    asked, arguments = parser.parse_known_args(argv)
    mutants = draw(seed=asked.seed, count=asked.count)
    if asked.action == "draw":
        print("\n".join(mutant.describe() for mutant in mutants))
    elif asked.action == "trace":
        trace(mutants, asked.files[0], arguments)
    else:
        run(mutants, *asked.files)


if __name__ == "__main__":
    main()
