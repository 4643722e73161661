"""The import contracts of pyproject.toml hold, the modules of without_torch.txt import no torch, and a broken rule is found.

Everything of ours is imported as `triaxis.`: a user's own `engine` or `models` may be in the same process.
"""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest
from mypy.modulefinder import FindModuleCache, SearchPaths
from mypy.options import Options

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("engine", "models", "launch")
BARE = re.compile(
    r"^(?:engine|models|launch)(?:\.(?!py$)[a-z_]\w*)+(?::\w+)?$"  # a module to import, or to patch
    r"|(?:^|[\n;\"'])\s*(?:from|import) (?:engine|models|launch)\b(?![/-])"
    r"|(?:-m|--module) (?:engine|models|launch)\b(?![/-])"
)
"""A module of ours in a string without `triaxis.`."""

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


def test_the_contracts_are_kept():
    checked = lint(ROOT)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "0 broken" in checked.stdout


WITHOUT_TORCH = (Path(__file__).parent / "without_torch.txt").read_text().split()
"""Modules that import no torch, and packages (`.*`) in which no module does: they are quick to start and to test."""


def without_torch(graph: grimp.ImportGraph) -> list[str]:
    """The modules of the list; an entry that names none is an error."""
    found: list[str] = []
    for entry in WITHOUT_TORCH:
        package = f"triaxis.{entry.removesuffix('.*')}"
        modules = {package} & graph.modules
        modules |= {name for name in graph.modules if entry.endswith(".*") and name.startswith(f"{package}.")}
        assert modules, f"{entry} of without_torch.txt is no module"
        found += sorted(modules)
    return found


def chains_to_torch(graph: grimp.ImportGraph, modules: list[str]) -> list[str]:
    """Chains of imports, those inside functions too, from these modules to torch."""
    chains = (graph.find_shortest_chain(importer=module, imported="torch") for module in modules)
    return [" -> ".join(chain) for chain in chains if chain is not None]


def test_modules_of_the_list_import_no_torch():
    graph = grimp.build_graph("triaxis", include_external_packages=True, exclude_type_checking_imports=True)
    assert not chains_to_torch(graph, without_torch(graph))
    assert chains_to_torch(graph, ["triaxis.engine.train"]), "a chain would be found"
    assert sorted(set(WITHOUT_TORCH)) == WITHOUT_TORCH


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


def bare_imports(source: str) -> Iterator[int]:
    """Lines that import a module of ours without `triaxis.`, in statements or in strings."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                bare = any(one.name.split(".")[0] in PRODUCT for one in names)
            case ast.ImportFrom(level=0, module=str(module)):
                bare = module.split(".")[0] in PRODUCT
            case ast.Constant(value=str(text)):
                bare = BARE.search(text) is not None
            case _:
                continue
        if bare:
            yield node.lineno


def test_everything_of_ours_is_imported_as_triaxis() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for top in (*PRODUCT, "tests", "benchmarks", "triaxis")
        for path in sorted((ROOT / top).rglob("*.py"))
        if path != Path(__file__)
        for line in bare_imports(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import engine.step",
        "from models import specs",
        "patch('engine.train.build')",
        "SINK = 'engine.telemetry.outlets.wandb:WandbSink'",
        "run('import sys; from launch.cli import main')",
        "run('torchrun --module launch.pretrain_gpt')",
    ],
)
def test_a_bare_import_is_found(line: str) -> None:
    assert list(bare_imports(line)) == [1]


@pytest.mark.parametrize("line", ["import triaxis.engine.step", "read('models/Llama')", "note('the engine. Its step')"])
def test_other_words_are_no_imports(line: str) -> None:
    assert not list(bare_imports(line))


def test_mypy_checks_every_file_of_the_product() -> None:
    """It does not follow every kind of link: what it would check is asked, as `packages` of pyproject.toml names it."""
    finder = FindModuleCache(SearchPaths((str(ROOT),), (), (), ()), None, Options())
    checked = {Path(found.path).resolve() for found in finder.find_modules_recursive("triaxis") if found.path}
    files = {path for top in PRODUCT for path in (ROOT / top).rglob("*.py")}
    assert len(files) > 500 and files <= checked, sorted(files - checked)
