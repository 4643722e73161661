"""No `.float()` and no literal float32 in engine/ and models/ outside precision.py.

The accumulation dtype is promote_types(parameter dtype, float32), computed in one place; a cast to float32 anywhere else
would round a float64 run, whose parity with the oracle is the proof that layouts are right.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXEMPT = ROOT / "engine" / "numerics" / "precision.py"
SINGLE = ("float32", "float")


def casts_to_single(source: str) -> Iterator[tuple[int, str]]:
    """Lines of `source` with `x.float()`, `torch.float32`, `torch.float`, `FloatTensor` or an import of them."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="float"), args=[], keywords=[]):
                yield node.lineno, ".float()"
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in (*SINGLE, "FloatTensor"):
                yield node.lineno, f"torch.{name}"
            case ast.ImportFrom(module="torch", names=names):
                yield from ((node.lineno, f"from torch import {alias.name}") for alias in names if alias.name in SINGLE)


def test_no_cast_to_single_outside_precision():
    files = [path for folder in ("engine", "models") for path in (ROOT / folder).rglob("*.py") if path != EXEMPT]
    assert len(files) > 20
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}" for path in files for line, what in casts_to_single(path.read_text())
    ]
    assert not found, "use engine.numerics.precision.accumulation_dtype:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "y = x.float()",
        "y = x.to(torch.float32)",
        "y = torch.zeros(3, dtype=torch.float)",
        "from torch import float32",
        "y = torch.FloatTensor([1])",
    ],
)
def test_a_cast_is_found(source):
    assert list(casts_to_single(source))


@pytest.mark.parametrize("source", ["y = float(x)", "x.is_floating_point()", "y = torch.float64", "y = np.float32(1)"])
def test_the_rest_is_allowed(source):
    assert not list(casts_to_single(source))
