"""The recipe of a number of a step is what the code has."""

from pathlib import Path

from triaxis.engine.telemetry.meters.result_numbers import Outliers
from triaxis.engine.telemetry.meters.table import METERS

ROOT = Path(__file__).resolve().parents[4]


def test_the_diff_of_the_recipe_is_in_its_files() -> None:
    recipe = (ROOT / "docs" / "extending.md").read_text().partition("## A number of a step")[2]
    diff = recipe.partition("```diff\n--- a/")[2].partition("```")[0]
    files = dict(part.split("\n", 1) for part in diff.split("--- a/"))
    assert len(files) == 2 and Outliers.of in METERS
    for path, added in files.items():
        lines = (ROOT / path).read_text().splitlines()
        assert not {line[1:] for line in added.splitlines()} - {*lines}, path
