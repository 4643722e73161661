"""The benchmark of the simulator runs at toy size; nobody looks at seconds."""

import pytest

from benchmarks import simulate


def test_it_prints_a_row_for_each_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    simulate.main(["--pp", "2", "--microbatches", "4"])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[2:]] == [["1f1b", "16"], ["zb_h1", "24"], ["interleaved", "32"]]
    # 1F1B: 3 of 15 without messages, of which four on the critical path take 0.05 each: 3.2 of 15.2.
    assert rows[2][-1] == "21.05%"
