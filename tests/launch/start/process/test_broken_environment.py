"""An error of the environment is told from one of ours: too little memory, and modules on PYTHONPATH that hide packages."""

import importlib
import sys
from pathlib import Path

import pytest

from triaxis.launch.start.process.broken_environment import named_environment


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_too_little_memory_is_said(error: Exception) -> None:
    assert "too little memory for this command" in str(named_environment(error))


def test_a_module_that_hides_a_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packaging.py").write_text("raise RuntimeError('mine')\n")
    (tmp_path / "of_mine.py").write_text("raise RuntimeError('mine')\n")
    (tmp_path / "rich").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "packaging", raising=False)
    with pytest.raises(RuntimeError) as failed:
        importlib.import_module("packaging")
    said = str(named_environment(failed.value))
    assert said.startswith(f"{tmp_path / 'packaging.py'}: imported in place of the installed package")
    assert "RuntimeError: mine" in said
    (tmp_path / "packaging.py").unlink()
    with pytest.raises(RuntimeError) as failed:
        importlib.import_module("of_mine")
    assert named_environment(failed.value) is None


def test_other_errors_are_ours() -> None:
    for error in (ValueError("x"), OSError(2, "No such file")):
        assert named_environment(error) is None
