"""The README's picture is what its script makes of a run's log, and fits 100 columns."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import first_screen

ROOT = Path(__file__).resolve().parents[2]
TEXT = "{http://www.w3.org/2000/svg}text"


def lines_of(svg: str) -> list[str]:
    return [each.text or "" for each in ET.fromstring(svg).iter(TEXT) if each.get("class") != "bar"]


@pytest.mark.slow
def test_the_picture_holds_the_lines_of_a_log(tmp_path: Path) -> None:
    shipped = (ROOT / "docs" / "first_screen.svg").read_text()
    assert "prefers-color-scheme: dark" in shipped
    lines = lines_of(shipped)
    assert max(map(len, lines)) <= first_screen.MOST_COLUMNS
    # Lines of a log come back as they are; those of the shipped picture are such lines.
    table = lines[lines.index(next(line for line in lines if line.split()[:2] == ["step", "loss"])) :]
    (tmp_path / "run.log").write_text("\n".join(["config  configs/gpt_tiny.yaml", *table]))
    first_screen.main([str(tmp_path / "run.log"), str(tmp_path / "again.svg")])
    assert (tmp_path / "again.svg").read_text() == shipped
