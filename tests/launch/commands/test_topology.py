"""`triaxis topology`: the text that people read, and the picture."""

from pathlib import Path

import pytest

from engine.errors import ConfigError, TopologyError
from engine.layout.rank_grid import ParallelSizes, RankGrid
from launch.cli import command_module, command_parser, main
from launch.report.topology_picture import draw
from launch.report.topology_text import shorten

GOLDEN = Path(__file__).parents[2] / "golden" / "topology"
TINY = Path(__file__).parents[3] / "configs" / "gpt_tiny.yaml"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    command = command_module("topology")
    assert command.run(command_parser(command).parse(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("16_ranks_tp2_pp2_dp4", "--tp 2 --pp 2 --dp 4 --ranks-per-node 8"),
        ("1024_ranks_tp8_pp8_dp16", "--tp 8 --pp 8 --dp 16 --ranks-per-node 8"),
        ("12_ranks_tp_across_nodes", "--tp 4 --dp 3 --ranks-per-node 6 --allow-tp-across-nodes"),
        ("128_ranks_large_nodes", "--tp 2 --pp 4 --dp 16 --ranks-per-node 64"),
    ],
)
def test_the_text_is_the_golden_one(capsys: pytest.CaptureFixture[str], name: str, arguments: str) -> None:
    text = shown(capsys, *arguments.split())
    assert text == (GOLDEN / f"{name}.txt").read_text()
    assert max(map(len, text.splitlines())) <= 120


def test_a_config_gives_its_sizes_and_the_groups_of_its_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, "--config", str(TINY))
    assert text.startswith("8 ranks: tp 2 x pp 2 x dp 2, on 1 node of 8")
    assert "ends: 4 groups of 2 ranks" in text and "kv replicas" not in text
    path = tmp_path / "gqa.yaml"
    path.write_text(
        TINY.read_text()
        .replace("  tp: 2 ", "  tp: 4 ")
        .replace("  num_attention_heads: 4", "  num_kv_heads: 1\n  num_attention_heads: 4")
    )
    text = shown(capsys, "--config", str(path))
    assert "kv replicas: 4 groups of 4 ranks" in text and "replicas of one of 1 key/value head\n  [0 1 2 3]" in text
    monkeypatch.setenv("DP", "4")
    assert shown(capsys, "--config", str(TINY), "--world-size", "16").startswith("16 ranks: tp 2 x pp 2 x dp 4")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ("--tp 8 --dp 2 --ranks-per-node 4", TopologyError, "span two nodes"),
        ("--tp 0", TopologyError, "sizes start at 1"),
        ("--tp 2 --ranks-per-node 0", TopologyError, "at least 1 rank"),
        ("--tp 2 --world-size 8", TopologyError, "belongs to a config"),
        (f"--config {TINY} --tp 2", TopologyError, "both say what the layout is"),
        (f"--config {TINY} --world-size 12", ConfigError, "world size 12"),
        (f"--config {TINY} --ranks-per-node 1", ConfigError, "slow network"),
        ("--tp 2 --out nowhere/at/all.png", TopologyError, "cannot be written"),
        ("--tp 2 --out x.unknown", TopologyError, "Format 'unknown' is not supported"),
    ],
)
def test_what_cannot_be_shown_is_refused(arguments: str, error: type[Exception], words: str) -> None:
    command = command_module("topology")
    with pytest.raises(error, match=words):
        command.run(command_parser(command).parse(arguments.split()))


def test_a_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "layout.png"
    assert shown(capsys, *f"--tp 2 --pp 2 --dp 4 --ranks-per-node 8 --out {path}".split()).endswith(
        f"\npicture: {path}\n"
    )
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    with pytest.raises(TopologyError, match="do not fit a picture"):
        draw(RankGrid(ParallelSizes(dp=8200)), tmp_path / "large.png")


def test_every_rank_is_in_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "layout.svg"
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(RankGrid(ParallelSizes(tp=4, dp=3), 6, allow_tp_across_nodes=True), path)
    svg = path.read_text()
    assert all(f">{rank}</text>" in svg for rank in range(12))
    assert svg.count(">node ") == 2


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([5], "5"),
        ([0, 1], "0 1"),
        ([0, 1, 2, 3], "0 1 2 3"),
        ([8, 9, 10, 11, 12], "8-12"),
        (list(range(0, 64, 8)), "0 8 16 24 32 40 48 56"),
        (list(range(0, 128, 8)), "0 8 .. 120"),
        ([0, 1, 3], "0 1 3"),
    ],
)
def test_ranks_are_written_as_a_person_would(ranks: list[int], text: str) -> None:
    assert shorten(ranks) == text


def test_the_command_line_prints_errors_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--tp", "8", "--dp", "2", "--ranks-per-node", "4"]) == 2
    assert capsys.readouterr().err.startswith("error: parallel.tp = 8 must divide the 4 ranks of a node")
