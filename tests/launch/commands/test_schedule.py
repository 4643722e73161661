"""`triaxis schedule` as a user types it."""

import re
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest

from triaxis.launch.cli import main
from triaxis.launch.pictures import schedule_picture

ROOT = Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"


def test_print_writes_what_can_be_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    from triaxis.engine.pipeline import schedules
    from triaxis.engine.pipeline.text import from_text

    assert main(["schedule", "print", "--pp", "4", "--vpp", "2", "--microbatches", "8"]) == 0
    assert from_text(capsys.readouterr().out) == schedules.interleaved(4, 2, 8)
    assert main(["schedule", "print", "--pp", "2", "--microbatches", "3", "--name", "forward_only"]) == 0
    assert from_text(capsys.readouterr().out) == schedules.build("forward_only", 2, 1, 3)


def test_print_the_program_and_the_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--pp", "2", "--microbatches", "2"]
    assert main(["schedule", "print", *sizes, "--form", "program"]) == 0
    assert "rank 1: [<F0@1] 0F0 [<F1@1] 0B0 [>B0@0] 0F1 0B1 [>B1@0]" in capsys.readouterr().out
    out = tmp_path / "picture.txt"
    assert main(["schedule", "print", *sizes, "--form", "timeline", "--output", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("rank 0 |F0 F1 ......B0=== ...B1=== |\n")


def test_print_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "picture.svg"
    sizes = ["--pp", "2", "--vpp", "2", "--microbatches", "2"]
    assert main(["schedule", "print", *sizes, "--form", "svg", "--output", str(out)]) == 0
    root = ElementTree.parse(out).getroot()
    names = [each.text for each in root.iter(SVG + "title")]
    # A rank computes a forward and a backward of two microbatches in each of its two chunks.
    for kind, chunk, microbatch in product(("forward", "backward"), (0, 1), (0, 1)):
        assert names.count(f"{kind} of microbatch {microbatch}, chunk {chunk}") == 2
    texts = [each.text for each in root.iter(SVG + "text")]
    assert texts[0] == "interleaved, pp 2, vpp 2, 2 microbatches: idle at most 20.0%"
    assert {"rank 0", "rank 1", "forward, chunk 0", "backward, chunk 1", "time in forwards of one chunk"} <= {*texts}
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [
        [float(each.attrib.get(side, 0)) for side in ("x", "y", "width", "height")] for each in root.iter(SVG + "rect")
    ]
    assert all(x + w <= width and y + h <= height for x, y, w, h in boxes)


def test_a_colour_of_many_chunks_is_once_in_the_legend(tmp_path: Path) -> None:
    """Four shades for six chunks: chunks 0 and 4 look alike, and so do 1 and 5."""
    out = tmp_path / "picture.svg"
    sizes = ["--pp", "2", "--vpp", "6", "--microbatches", "2"]
    assert main(["schedule", "print", *sizes, "--form", "svg", "--output", str(out)]) == 0
    texts = [each.text or "" for each in ElementTree.parse(out).getroot().iter(SVG + "text")]
    assert [text for text in texts if text.startswith("forward")] == [
        *("forward, chunks 0, 4", "forward, chunks 1, 5", "forward, chunk 2", "forward, chunk 3")
    ]


def test_check_says_what_a_schedule_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "check", "--pp", "2", "--microbatches", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1f1b, pp 2, vpp 1, 4 microbatches: complete, in order")
    assert lines[2].split() == ["0", "2", "1", "8", "20.0%"]
    assert lines[3].split() == ["1", "1", "1", "8", "20.0%"]


LONG = ("gpt_1t.yaml", "gpt_530b.yaml", "llama3_405b.yaml")
"""Configs whose programs have most instructions: they take 33 of this file's 35 seconds."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=[pytest.mark.slow] if path.name in LONG else [])
        for path in sorted((ROOT / "configs").glob("*.yaml"))
    ],
)
def test_every_config_has_a_schedule_that_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "check", "--config", str(path)]) == 0
    assert "forward_only" in capsys.readouterr().out


def test_a_picture_has_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_picture, "MOST_ACTIONS", 7)
    out = tmp_path / "picture.svg"
    assert main(["schedule", "print", "--pp", "2", "--microbatches", "2", "--form", "svg", "--output", str(out)]) == 2
    assert "8 actions do not fit a picture that can be read (at most 7)" in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["print", "--pp", "2"], "--microbatches not given"),
        (["check"], "--pp and --microbatches not given"),
        (["print", "--pp", "2", "--microbatches", "0"], "microbatches=0"),
        (
            ["print", "--pp", "2", "--vpp", "2", "--microbatches", "2", "--name", "1f1b"],
            "schedule.name = interleaved or auto",
        ),
        (["print", "--pp", "2", "--microbatches", "2", "--name", "interleaved"], "nothing to interleave"),
        (["print", "--pp", "2", "--microbatches", "2", "--name", "zb-h1"], "names are auto, gpipe, 1f1b"),
        (["print", "--pp", "2", "--microbatches", "2", "--form", "svg"], "without --out"),
        (["print", "--pp", "2", "--microbatches", "2", "--form", "svg", "--output", "x.png"], "such as x.svg"),
        (["check", "--config", "x.yaml", "--pp", "2"], "x.yaml together with --pp"),
        (["check", "--pp", "2", "--microbatches", "2", "--dp", "2"], "--dp without a config"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "dp", "microbatches"),
    [
        ([], 1, 8),  # 8 microbatches for 2 pipeline ranks: a second replica would leave 2 per rank
        (["train.global_batch_size=128"], 4, 8),
        (["parallel.pp=1", "parallel.vpp=1"], 2, 4),
        (["train.global_batch_size=24"], 1, 6),
        (["train.global_batch_size=72"], 1, 18),  # dp 2 would leave 9, which the interleaved schedule cannot deal out
    ],
)
def test_an_open_dp_leaves_every_pipeline_a_few_microbatches(
    overrides: list[str], dp: int, microbatches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = str(ROOT / "configs" / "gpt_tiny.yaml")
    assert main(["schedule", "check", tiny, "parallel.dp=null", *overrides]) == 0
    out = capsys.readouterr().out
    assert f"x dp {dp}; " in out and f"{microbatches} microbatches" in out and "dp is open: --gpus N" in out
    assert main(["schedule", "check", tiny, "parallel.dp=null", *overrides, "--dp", "1"]) == 0
    assert "dp is open" not in capsys.readouterr().out


def test_a_config_is_printed_as_its_sizes_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "print", str(ROOT / "configs" / "gpt_tiny.yaml")]) == 0
    of_config = capsys.readouterr().out
    assert main(["schedule", "print", "--pp", "2", "--vpp", "2", "--microbatches", "4"]) == 0
    assert of_config == capsys.readouterr().out


def test_times_of_sizes_with_messages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "times", "--pp", "2", "--microbatches", "2", "--transfer", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # A forward, its message, two microbatches there and back, the last gradient, its backward of two.
    assert lines[:2] == [
        "1f1b, pp 2, vpp 1, 2 microbatches; unit of time: forwards of a stage",
        "span 11.00, bubble 45.45% of it on the rank that waits most",
    ]
    assert [line.split() for line in lines[2:5]] == [
        ["rank", "busy", "bubble", "messages", "in", "flight"],
        ["0", "54.5%", "27.3%", "18.2%", "2"],
        ["1", "54.5%", "36.4%", "9.1%", "1"],
    ]
    assert lines[5] == "critical path: forward 27.3%, transfers 18.2%, backward 54.5%"
    assert lines[6:11] == [
        "  0.00 to 1.000  rank 0: 0F0",
        "  1.000 to 2.000  activation of microbatch 0 for stage 1 (rank 0 to 1)",
        "  2.000 to 8.000  rank 1: 0F0 0B0 0F1 0B1",
        "  8.000 to 9.000  gradient of microbatch 1 for stage 0 (rank 1 to 0)",
        "  9.000 to 11.00  rank 0: 0B1",
    ]


def test_times_of_a_config_by_flops_or_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> tuple[str, float]:
        assert main(["schedule", "times", *words]) == 0
        out = capsys.readouterr().out
        unit, span = re.search(r"unit of time: (.*)", out), re.search(r"span ([\d.]+), bubble", out)
        assert unit is not None and span is not None
        return unit[1], float(span[1])

    words = ("gpt_tiny", "--dp", "2", "parallel.vpp=1")
    unit, span = said(*words)
    assert unit == "forwards of a mean layer (by FLOPs)"
    assert said(*words, "--transfer", "3")[1] > span
    assert said(*words, "schedule.name=zb_h1")[1] < span
    unit, _ = said(*words, "data.attention=within")
    assert unit.endswith("as if tokens attended across documents")
    unit, seconds = said("llama3_8b", "--gpus", "64", "--cluster", "64xH100", "parallel.pp=2")
    assert unit == "seconds on 64xH100" and 0.1 < seconds < 100


@pytest.mark.parametrize(
    ("words", "explained"),
    [
        (["--pp", "2"], "--microbatches not given"),
        (["--pp", "2", "--microbatches", "2", "--cluster", "64xH100"], "--cluster without a config"),
        (["--pp", "2", "--microbatches", "2", "--transfer", "-1"], "--transfer -1.0: what ends before it starts"),
        (["gpt_tiny", "--pp", "2"], "together with --pp"),
    ],
)
def test_times_of_what_cannot_be_timed(words: list[str], explained: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "times", *words]) == 2
    assert explained in capsys.readouterr().err
