"""`triaxis topology`: the text that people read, and the picture."""

from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest

from triaxis.engine.errors import ConfigError, TopologyError, TriaxisError
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid
from triaxis.launch.cli import command_module, command_parser, main
from triaxis.launch.pictures.topology_picture import draw_topology
from triaxis.launch.pictures.topology_text import shorten

GOLDEN = Path(__file__).parents[2] / "golden" / "topology"
SVG = "{http://www.w3.org/2000/svg}"
TINY = Path(__file__).parents[3] / "configs" / "gpt_tiny.yaml"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    command = command_module("topology")
    assert command.run(command_parser(command).parse(arguments)) == 0
    return capsys.readouterr().out


def texts(path: Path) -> list[str]:
    """Return the lines of text in a picture."""
    return [each.text or "" for each in ElementTree.parse(path).iter(SVG + "text")]


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
        ("--tp 2 --ranks-per-node 0", ConfigError, "--ranks-per-node 0: must be at least 1"),
        ("--tp 2 --world-size 8", TopologyError, "--gpus 8 needs a config"),
        (f"--config {TINY} --tp 2", TopologyError, "both set the layout"),
        (f"--config {TINY} --world-size 12", ConfigError, "world size 12"),
        (f"--config {TINY} --ranks-per-node 1", ConfigError, "slow network"),
        ("--tp 2 --output nowhere/at/all.svg", TriaxisError, "cannot be written"),
        ("--tp 2 --output x.png", TriaxisError, "x.png: pictures are SVG.* such as x.svg"),
    ],
)
def test_what_cannot_be_shown_is_refused(arguments: str, error: type[Exception], words: str) -> None:
    command = command_module("topology")
    with pytest.raises(error, match=words):
        command.run(command_parser(command).parse(arguments.split()))


def test_a_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "layout.svg"
    assert shown(capsys, *f"--tp 2 --pp 2 --dp 4 --ranks-per-node 8 --output {path}".split()).endswith(
        f"\npicture: {path}\n"
    )
    assert "16 ranks on 2 nodes: tp 2 x pp 2 x dp 4" in texts(path)
    with pytest.raises(TopologyError, match="do not fit a picture"):
        draw_topology(RankGrid(ParallelSizes(dp=8200)), tmp_path / "large.svg")


def test_every_rank_is_in_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "layout.svg"
    draw_topology(RankGrid(ParallelSizes(tp=4, dp=3), 6, allow_tp_across_nodes=True), path)
    shown = texts(path)
    assert [text for text in shown if text.isdigit()] == [str(rank) for rank in range(12)]
    assert [text for text in shown if text.startswith("node ")] == ["node 0", "node 1"]
    assert [text for text in shown if text.startswith("dp ")] == ["dp 0", "dp 1", "dp 1", "dp 2"]


def test_the_tensor_parallel_groups_of_a_stage_that_share_samples_have_a_colour_each(tmp_path: Path) -> None:
    path = tmp_path / "layout.svg"
    draw_topology(RankGrid(ParallelSizes(tp=2, cp=2, pp=2, dp=2), 16), path)
    cells = [each.attrib for each in ElementTree.parse(path).getroot().iter(SVG + "rect")]
    colours = [cell["fill"] for cell in cells if cell["width"] == cell["height"]]
    assert len(colours) == 16 and len(set(colours)) == 8 and colours[::2] == colours[1::2]
    assert any(text.endswith("shade: index over dp and cp") for text in texts(path))
    assert [text for text in texts(path) if text.startswith("cp ")] == ["cp 0", "cp 1"] * 4


def test_what_is_drawn_lies_inside_the_picture_and_no_cells_overlap(tmp_path: Path) -> None:
    path = tmp_path / "layout.svg"
    draw_topology(RankGrid(ParallelSizes(tp=4, pp=4, dp=4), 8), path)
    root = ElementTree.parse(path).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [
        [float(each.attrib.get(side, 0)) for side in ("x", "y", "width", "height")] for each in root.iter(SVG + "rect")
    ]
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in boxes)
    cells = [box for box in boxes if box[2] == box[3]]
    assert len(cells) == 64
    assert all(abs(a[0] - b[0]) >= a[2] or abs(a[1] - b[1]) >= a[3] for a, b in combinations(cells, 2))


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
