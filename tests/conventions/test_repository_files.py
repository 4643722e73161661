"""Files that other programs read: CI's workflow, templates, container recipes. What they name exists, and their syntax is sound."""

import re
from pathlib import Path

import pytest
import yaml

from triaxis.launch.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
YAML_FILES = (*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff")
RECIPES = (
    *(ROOT / "launch" / "container" / name for name in ("Dockerfile", "triaxis.def")),
    ROOT / ".github" / "workflows" / "ci.yml",
)
NAMED = re.compile(r"(?<![\w/.-])(?:(?:launch|configs|tests|docs)/[\w./-]*\w|\.ci/\w+)")


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_yaml_is_a_mapping(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_paths_in_a_recipe_exist(path: Path) -> None:
    named = NAMED.findall(path.read_text())
    assert named and not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("path", RECIPES[:-1], ids=lambda path: path.name)
def test_a_recipe_installs_extras_and_shows_commands_that_exist(path: Path) -> None:
    text, project = path.read_text(), (ROOT / "pyproject.toml").read_text()
    (extras,) = re.findall(r"--editable '\.\[(.+)\]'", text)
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
    shown = re.findall(r"^#   (?:docker|apptainer) run .*?triaxis(?:\.sif)? (\w+)", text, re.MULTILINE)
    assert shown and set(shown) <= set(COMMANDS)


def test_the_citation_has_the_version_and_licence_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f'version = "{citation["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert citation["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text()
