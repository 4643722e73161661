"""Count code lines: AST statements without docstrings and imports.

    python -m benchmarks.code_lines                     # engine, models and launch, by folder
    python -m benchmarks.code_lines engine/step.py      # any files and folders

A statement counts once however many lines it takes, so reformatting, comments and docstrings leave the number alone. A
string that stands by itself is a docstring, also behind an attribute.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

PRODUCT = ("engine", "models", "launch")


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


def main(argv: Sequence[str] | None = None) -> None:
    """Print the code lines of each folder that is named, and of each of its folders."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.code_lines", description=__doc__.splitlines()[0])
    parser.add_argument("places", nargs="*", type=Path, default=[Path(name) for name in PRODUCT], metavar="PATH")
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for place in parser.parse_args(argv).places:
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
