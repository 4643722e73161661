"""The host's benchmark: what it makes of counts and rounds. Its subjects run on the stub alone."""

import argparse
import io

import pytest
from rich.console import Console

from benchmarks.host.__main__ import Measured, main, table_of


def measured(scale: float) -> Measured:
    """A subject whose layer costs 1 ms x scale forward and backward, and 0.5 ms x scale in the update."""
    halves = {depth: [{"cpu": scale * int(depth) / 1e3}, {"cpu": scale * int(depth) / 2e3}] for depth in ("2", "4")}
    counts = {
        depth: {
            "forward_backward": {"kernel": 10 + 20 * int(depth), "copy": int(depth), "message": 3},
            "update": {"kernel": 7, "fill": 1, "wait": 1},
            "peak_bytes": 3 * 2**30,
        }
        for depth in ("2", "4")
    }
    return Measured(counts, [halves, halves, halves])


def test_a_layer_is_half_the_difference_of_both_depths() -> None:
    one = measured(2.0)
    assert one.layer(0) == pytest.approx(2.0) and one.layer(1) == pytest.approx(1.0)
    assert one.calls("4", "forward_backward") == 94 and one.of_step("message") == 3


def test_a_ratio_is_ours_over_the_others_and_who_differs_is_marked() -> None:
    options = argparse.Namespace(shape="llama3_8b", tp=1, ep=1, tokens=8192, microbatches=2, rounds=3)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table_of({"triaxis": measured(1.0), "megatron": measured(2.0)}, options))
    lines = [line for line in console.export_text().splitlines() if "megatron" in line or "triaxis" in line]
    ours, theirs = ([cell.strip() for cell in line.strip("│").split("│")] for line in lines)
    assert ours[0] == "triaxis" and theirs[0] == "megatron *"
    assert ours[5] == "1.000" and theirs[5].startswith("0.500") and theirs[9].startswith("0.500")
    assert theirs[1] == "21" and theirs[-2:] == ["1", "3.0"]


def test_a_subject_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nobody"])
    assert "no subject is named nobody" in capsys.readouterr().err
