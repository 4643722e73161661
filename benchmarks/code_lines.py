"""Count code lines: AST statements without docstrings and imports.

    python -m benchmarks.code_lines                     # engine, models and launch, by folder
    python -m benchmarks.code_lines engine/step.py      # any files and folders
    python -m benchmarks.code_lines --unimported        # engine's files that no training rank imports

A statement counts once however many lines it takes, so reformatting, comments and docstrings leave the number alone. A
string that stands by itself is a docstring, also behind an attribute.

A training rank imports what `RANK` imports, and what that imports. Imports inside functions count, and so does a module whose name
stands in a string (sinks are loaded by name). Imports for the type checker do not.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("engine", "models", "launch")
RANK = "triaxis.launch.pretrain_gpt"


def count(source: str) -> int:
    """Return the code lines of a module's source."""
    return sum(is_code(node) for node in ast.walk(ast.parse(source)))


def is_code(node: ast.AST) -> TypeGuard[ast.stmt]:
    """Return whether a node is a statement other than an import and a docstring."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return not isinstance(node.value.value, str)
    return isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom)


def files_of(place: Path) -> list[Path]:
    """Return the Python files of a folder, or the file itself."""
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def unimported() -> dict[str, int]:
    """Return the code lines of engine's files that no training rank imports, by path; files without a code line are left out."""
    modules = {_module(path): path for top in PRODUCT for path in files_of(ROOT / top)}
    found: set[str] = set()
    pending = {RANK}
    while pending:
        module = pending.pop()
        found.add(module)
        # A module's packages are imported before it.
        pending |= ({module.rpartition(".")[0]} | imports(modules[module].read_text())) & modules.keys() - found
    left = (path for module, path in modules.items() if path.is_relative_to(ROOT / "engine") and module not in found)
    counts = {str(path.relative_to(ROOT)): count(path.read_text()) for path in left}
    return {path: lines for path, lines in counts.items() if lines}


def _module(path: Path) -> str:
    return ".".join(("triaxis", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def imports(source: str) -> set[str]:
    """Return the names that a module's source imports, and those in its strings; some are not of modules."""
    found = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        match pending.pop():
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.Import(names=names):
                found.update(name.name for name in names)
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module, *(f"{module}.{name.name}" for name in names)}
            case ast.Constant(value=str(text)) if text.startswith("triaxis."):
                found.add(text.partition(":")[0])
            case node:
                pending += ast.iter_child_nodes(node)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the code lines of each folder that is named, and of each of its folders."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.code_lines", description=__doc__.splitlines()[0])
    parser.add_argument("places", nargs="*", type=Path, default=[Path(name) for name in PRODUCT], metavar="PATH")
    parser.add_argument("--unimported", action="store_true", help="engine's files that no training rank imports")
    arguments = parser.parse_args(argv)
    if arguments.unimported:
        left = unimported()
        for path, total in [*left.items(), ("in all", sum(left.values()))]:
            print(f"{total:8,}  {path}")
        return
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for place in arguments.places:
        for file in files_of(place):
            # A folder's own files, and each of its folders, are a row each.
            row = str(place if file.parent == place else Path(*file.parts[: len(place.parts) + 1]))
            found = count(file.read_text())
            for key in dict.fromkeys((row, "in all")):
                lines[key] += found
                files[key] += 1
    for row, total in sorted(lines.items(), key=lambda item: (item[0] == "in all", item[0])):
        print(f"{total:8,}  {files[row]:5,} files  {row}")


if __name__ == "__main__":
    main()
