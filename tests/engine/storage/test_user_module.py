"""Modules of users: found, told apart by their digest, loaded under a private name, and kept by a run."""

import shutil
import sys
from pathlib import Path

import pytest

from triaxis.engine.storage.user_module import (
    PRIVATE,
    UserModuleError,
    available_source,
    find_sources,
    keep,
    load,
    place_in_user_module,
)


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the modules' folders, one of which has a torch.py, from the processes that later tests start."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def loaded_from(source: str) -> object:
    return load(source, find_sources(source).digest())


@pytest.mark.parametrize("name", ["models.py", "engine.py", "torch.py"])
def test_a_module_hides_none_of_its_name(tmp_path: Path, name: str) -> None:
    before = sys.modules.get(name[:-3])
    module = loaded_from(written(tmp_path, name, f"whose = 'the user, {tmp_path}'"))
    assert getattr(module, "whose", "").startswith("the user")
    assert sys.modules.get(name[:-3]) is before and getattr(module, "__name__", "").startswith(PRIVATE)


def test_a_module_is_run_once_and_imports_its_neighbours(tmp_path: Path) -> None:
    written(tmp_path, "its_neighbour.py", "size = 3")
    source = written(tmp_path, "mine.py", f"import its_neighbour\nsize, runs = its_neighbour.size, ['{tmp_path}']")
    first = loaded_from(source)
    assert getattr(first, "size", 0) == 3
    Path(source).unlink()
    assert load(source, getattr(first, "__name__", "").removeprefix(PRIVATE)) is first


def test_a_package_imports_itself_and_all_its_files_are_in_its_digest(tmp_path: Path) -> None:
    written(tmp_path, "lab/__init__.py", f"from .inner import size  # {tmp_path}")
    written(tmp_path, "lab/inner.py", "size = 4")
    source = str(tmp_path / "lab")
    digest = find_sources(source).digest()
    assert getattr(load(source, digest), "size", 0) == 4
    written(tmp_path, "lab/inner.py", "size = 5")
    assert find_sources(source).digest() != digest
    written(tmp_path, "lab/inner.py", "size = 4")
    assert find_sources(source).digest() == digest
    Path(tmp_path, "lab/inner.py").rename(tmp_path / "lab/other.py")
    assert find_sources(source).digest() != digest


def test_a_module_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "a_lab_of_mine/__init__.py", "")
    written(tmp_path, "a_lab_of_mine/layers.py", "from . import __name__ as above")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = loaded_from("a_lab_of_mine.layers")
    assert getattr(module, "above", "") == "a_lab_of_mine"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("/nowhere/mine.py", "no such file"),
        ("/nowhere/lab", "neither a .py file nor a package"),
        ("no_such_module_at_all", "no module with this name"),
        ("no_such.module", "fails to look for it"),
    ],
)
def test_a_missing_module_is_named(source: str, says: str) -> None:
    with pytest.raises(UserModuleError, match=says):
        find_sources(source)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ny = (", r"mine.py, line 2: SyntaxError"),
        ("x = 1\n\nx.y", r"mine.py, line 3: AttributeError"),
        ("def f():\n    return 1 / 0\nf()", r"mine.py, line 2: ZeroDivisionError"),
        ("import json\njson.loads('')", r"mine.py, line 2: JSONDecodeError"),
    ],
)
def test_an_error_of_a_module_names_its_line_and_leaves_no_half_of_it(tmp_path: Path, text: str, says: str) -> None:
    source = written(tmp_path, "mine.py", text)
    digest = find_sources(source).digest()
    with pytest.raises(UserModuleError, match=says):
        load(source, digest)
    assert PRIVATE + digest[:16] not in sys.modules


def test_an_error_inside_a_call_has_its_place(tmp_path: Path) -> None:
    module = loaded_from(written(tmp_path, "mine.py", f"def f():\n    raise KeyError('{tmp_path}')\n"))
    with pytest.raises(KeyError) as caught:
        getattr(module, "f", None)()  # type: ignore[misc]
    assert place_in_user_module(caught.value) == f"{tmp_path}/mine.py, line 2, in f"
    assert place_in_user_module(ValueError()) == ""


def test_other_sources_are_refused(tmp_path: Path) -> None:
    source = written(tmp_path, "mine.py", "a = 1")
    digest = find_sources(source).digest()
    written(tmp_path, "mine.py", "a = 2")
    with pytest.raises(UserModuleError, match="sources were changed"):
        load(source, digest)
    with pytest.raises(UserModuleError, match="has changed since it was loaded"):
        keep(tmp_path, source, digest)


@pytest.mark.parametrize("name", ["mine.py", "lab/__init__.py"])
def test_a_run_keeps_a_copy_for_its_readers(tmp_path: Path, name: str) -> None:
    source = written(tmp_path, name, f"where = '{tmp_path}'")
    if name.startswith("lab"):
        written(tmp_path, "lab/deep/inner.py", "a = 1")
        source = str(tmp_path / "lab")
    digest, run = find_sources(source).digest(), tmp_path / "run"
    keep(run, source, digest)
    keep(run, source, digest)
    assert available_source(source, digest, run) == source
    written(tmp_path, name, "where = 'changed'")
    copy = available_source(source, digest, run)
    assert copy != source and find_sources(copy).digest() == digest
    assert getattr(load(copy, digest), "where", "") == str(tmp_path)
    shutil.rmtree(run)
    assert available_source(source, digest, run) == source
