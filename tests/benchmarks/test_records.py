"""Lines of results: a file grows by one line with the command and the machine, and numbers may name the machine better."""

import json
from datetime import datetime
from pathlib import Path

from benchmarks.records import append_record, machine


def test_a_file_is_made_and_grows_by_lines(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "some.jsonl"
    append_record(path, "some", ["--pairs", "3"], {"ratio": 1.5})
    append_record(path, "some", [], {"machine": {"gpu": "one"}}, launcher="torchrun --nproc-per-node 2")
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["command"] == "python -m benchmarks.some --pairs 3" and first["ratio"] == 1.5
    assert datetime.fromisoformat(first["time"]).utcoffset() is not None
    assert first["machine"].keys() == machine().keys() and first["machine"]["cores"] >= 1
    assert second["command"] == "torchrun --nproc-per-node 2 -m benchmarks.some" and second["machine"] == {"gpu": "one"}
