"""Observers are handed over when an object is built: no attribute of that name is set from outside, or after the constructor."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"observer", "observers", "clock", "on_saved"}


def late_assignments(source: str) -> Iterator[int]:
    """Yield the lines that set such an attribute, but for `self.NAME` in a constructor."""
    tree = ast.parse(source)
    built = {
        target
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in ("__init__", "__post_init__")
        for target in ast.walk(function)
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    for node in ast.walk(tree):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.lstrip("_") in NAMES
        if is_set and node not in built:
            yield node.lineno


def test_observers_are_constructor_arguments() -> None:
    late = [
        f"{path.relative_to(ROOT)}:{line}"
        for top in ("engine", "models", "launch")
        for path in sorted((ROOT / top).rglob("*.py"))
        for line in late_assignments(path.read_text())
    ]
    assert not late, f"set after construction: {late}. Pass it to the constructor, or to the call that it follows"


def test_an_observer_that_is_patched_in_would_be_found() -> None:
    assert list(late_assignments("engine.executor.observer = tell\nledger.clock, x = a, b")) == [1, 2]
    own = "class A:\n    def __init__(self, observer):\n        self.observer = observer\n"
    assert list(late_assignments(own)) == []
    assert list(late_assignments(own + "    def listen(self, other):\n        self._observer = other\n")) == [5]
