"""The import contracts of pyproject.toml hold, and a broken one would be seen."""

import shutil
import subprocess
import sys
from pathlib import Path

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


def test_an_import_against_the_house_is_found(tmp_path):
    for name in ("engine", "models", "launch"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    errors = tmp_path / "engine" / "errors.py"
    errors.write_text(f"import models.specs\nimport torch\n{errors.read_text()}")
    checked = lint(tmp_path)
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert "engine.errors -> models.specs" in checked.stdout
    assert "engine.errors -> torch" in checked.stdout
