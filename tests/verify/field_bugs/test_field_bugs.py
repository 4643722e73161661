"""`triaxis verify` names each bug of the field by the kind that goes wrong first, and blames no parameter that is right."""

import re
from pathlib import Path

import pytest

from tests.launch.command_line import ROOT
from tests.verify.field_bugs.bugs import FIELD_BUGS, IN_CI, FieldBug
from tests.verify.test_planted_bugs import trial_of
from tests.verify.trials import run


@pytest.mark.distributed
@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, id=str(bug), marks=() if str(bug) in IN_CI else pytest.mark.slow) for bug in FIELD_BUGS],
)
def test_a_bug_of_the_field_is_named(bug: FieldBug, references: Path) -> None:
    verdict = run(trial_of(bug.case, bug.dtype), references, bug.plant, sub_layouts=False)
    first, *_ = verdict.differences
    assert (first.what, first.step) == (bug.what, bug.step), verdict.differences[:3]
    blamed = [first] if bug.what == "output" else verdict.differences
    assert all(bug.names(one.name) for one in blamed), verdict.differences


def test_the_table_in_the_documentation_has_every_bug_with_its_report() -> None:
    table = (ROOT / "docs" / "verify.md").read_text().split("## The field's own bugs")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if re.search(r"#\d+", line)]
    assert len(rows) >= 12
    for bug in FIELD_BUGS:
        (row,) = (line for line in rows if f"`{bug}`" in line)
        assert bug.reported in row and f"`verify`: {bug.what}" in row
    assert set(IN_CI) < set(map(str, FIELD_BUGS))
