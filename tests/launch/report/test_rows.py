"""Records in one array: each reads as the dict that it was, in a part of its memory."""

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from triaxis.engine.telemetry.record.jsonl import read_records
from triaxis.launch.report.rows import Rows

numbers = st.integers() | st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=3) | st.lists(numbers, max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(st.text(max_size=2), values, max_size=5), max_size=4))
def test_a_row_reads_as_its_record(records: list[dict[str, Any]]) -> None:
    rows = Rows()
    for record, row in zip(records, [rows(record) for record in records], strict=True):
        assert row == record and list(row) == list(record)
        assert same_types(row, record)


def test_long_runs_take_little_memory(tmp_path: Path) -> None:
    record = {f"key{number}": number + 0.5 for number in range(30)} | {
        "parts": {f"part{number}": 0.1 * number for number in range(15)}
    }
    path = tmp_path / "metrics.jsonl"
    path.write_text((json.dumps(record) + "\n") * 400)

    def held_bytes(**kept: Any) -> int:
        tracemalloc.start()
        records = read_records(path, **kept)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert records.records == [record] * 400
        return held

    assert held_bytes(kept=Rows()) < 0.25 * held_bytes()


def same_types(here: Any, there: Any) -> bool:
    if isinstance(there, Mapping):
        return all(same_types(here[key], there[key]) and here.get(key) == there[key] for key in there)
    return type(here) is type(there)
