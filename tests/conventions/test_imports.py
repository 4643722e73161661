"""The import contracts of pyproject.toml hold, modules that claim to import no torch do not, and a broken rule would be seen."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_contracts_are_kept():
    checked = lint(ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "0 broken" in checked.stdout


def without_torch() -> Iterator[str]:
    """Names of the modules whose docstring claims that they import no torch."""
    for top in ("engine", "models", "launch"):
        for path in sorted((ROOT / top).rglob("*.py")):
            claim = ast.get_docstring(ast.parse(path.read_text())) or ""
            if "(no torch" in claim or "standard library only" in claim:
                yield ".".join(("triaxis", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def chains_to_torch(modules: list[str]) -> list[str]:
    """Chains of imports, those inside functions too, from these modules to torch."""
    graph = grimp.build_graph("triaxis", include_external_packages=True)
    chains = (graph.find_shortest_chain(importer=module, imported="torch") for module in modules)
    return [" -> ".join(chain) for chain in chains if chain is not None]


def test_modules_that_claim_to_import_no_torch_import_none():
    modules = list(without_torch())
    known = ("engine.errors", "engine.config.tree", "engine.pipeline.schedules", "models.specs")
    assert {f"triaxis.{name}" for name in known} < set(modules)
    assert not chains_to_torch(modules)
    assert chains_to_torch(["triaxis.engine.train"]), "a chain would be found"


def test_an_import_against_the_house_is_found(tmp_path):
    for name in ("engine", "models", "launch", "triaxis"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    errors = tmp_path / "engine" / "errors.py"
    errors.write_text(f"import triaxis.models.specs\nimport triaxis.engine.config.load\n{errors.read_text()}")
    checked = lint(tmp_path)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert "triaxis.engine.errors -> triaxis.models.specs" in checked.stdout
    assert "triaxis.engine.errors -> triaxis.engine.config.load" in checked.stdout
