"""The comparison of kernels' forms runs at toy size, and what it writes down is what it printed."""

import json
from pathlib import Path

import pytest

from benchmarks import kernels
from tests.harness import compiler

TOY = ["--tokens", "8", "--hidden", "16", "--head-dim", "8", "--vocab", "24", "--shard", "64", "--rounds", "2"]


@compiler()
@pytest.mark.slow
@pytest.mark.parametrize("only", ["rms_norm", ""])
def test_forms_are_timed_in_turn(only: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "kernels.jsonl"
    rows = kernels.main([*TOY, "--only", only, "--json", str(written)])
    printed = capsys.readouterr().out
    record = json.loads(written.read_text())
    assert [row["kernel"] for row in record["results"]] == [row.kernel for row in rows]
    assert record["sizes"]["vocab"] == 24 and record["machine"]["torch"]
    for row in rows:
        assert row.kernel.split()[0] in printed
        assert all(seconds > 0 for seconds in row.seconds.values())
        first, *others = row.seconds
        assert set(row.speedup) == set(others) and (first, *others) in (
            ("eager", "compiled"),
            ("torch", "compiled"),
            ("separate",),
            ("whole", "in quarters"),
        )


def test_state_forms_are_those_that_a_dtype_can_have() -> None:
    assert len(kernels.state_forms(kernels.DTYPES["bf16"])) == 2
    assert len(kernels.state_forms(kernels.DTYPES["fp32"])) == 1
