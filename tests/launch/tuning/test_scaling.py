"""Speed-up on several numbers of ranks: its losses add up, the picture has them, and a real run is measured."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.launch.command_line import TRIAXIS, run
from triaxis.engine.config.load import load_config
from triaxis.launch.cli import main
from triaxis.launch.tuning.layouts import FullestRank, LayoutResult
from triaxis.launch.tuning.scaling import draw_scaling, scaling_of, scaling_text


def measured(num_ranks: int, step_seconds: float, **time: float) -> LayoutResult:
    return LayoutResult(
        config=load_config("gpt_tiny", [], {}),
        layout=f"tp=1 pp=1 vpp=1 dp={num_ranks}",
        num_ranks=num_ranks,
        device="cpu, gloo",
        is_gpu=False,
        first_step=2,
        last_step=8,
        step_seconds=step_seconds,
        tokens_per_second=4096 / step_seconds,
        model_tflops=0.1,
        mfu=None,
        memory=FullestRank(0, 2**28, 2**20),
        time=time,
        loss=5.5,
    )


FOUR = measured(4, 0.4, compute=0.75, exposed_dp=0.15, optimizer=0.1)
ONE = measured(1, 1.0, compute=0.96, exposed_dp=0.0, optimizer=0.04)
TWO = measured(2, 0.5, compute=0.9, exposed_dp=0.02, optimizer=0.08)


def test_efficiency_and_losses_are_a_whole_step() -> None:
    one, two, four = scaling_of([FOUR, ONE, TWO])
    assert (one.num_ranks, one.speed_up, one.efficiency) == (1, 1.0, 1.0)
    assert (two.speed_up, two.efficiency) == (2.0, 1.0)
    assert four.speed_up == pytest.approx(2.5) and four.efficiency == pytest.approx(0.625)
    # By hand: 0.75 x 0.4 s of compute, of which 0.96 / 4 s are the ideal; all of the all-reduce; 0.04 s against 0.01 s of update.
    assert four.lost == pytest.approx({"compute": 0.15, "exposed_dp": 0.15, "optimizer": 0.075})
    for row in (one, two, four):
        assert row.efficiency + sum(row.lost.values()) == pytest.approx(1)


def test_the_largest_loss_comes_first() -> None:
    _, *rows, _ = scaling_text(scaling_of([ONE, TWO, FOUR])).splitlines()
    assert rows[0].split() == ["ranks", "tokens/s", "speed-up", "efficiency", "lost", "to"]
    assert rows[2].split(maxsplit=4)[:4] == ["2", "8,192", "2.00", "100%"], "a part that got faster is a gain"
    assert rows[3].endswith("62%  compute 15%, dp 15%, optimizer 8%")


def test_the_picture_stacks_each_bar_to_a_whole_step(tmp_path: Path) -> None:
    draw_scaling(scaling_of([ONE, FOUR]), "Speed-up of x", tmp_path / "s.svg")
    svg = ElementTree.parse(tmp_path / "s.svg")
    bars: dict[str, float] = {}
    for one in svg.iter("{http://www.w3.org/2000/svg}rect"):
        if one.get("width") == "56":
            bars[one.attrib["x"]] = bars.get(one.attrib["x"], 0.0) + float(one.attrib["height"])
    assert list(bars.values()) == pytest.approx([220, 220], abs=0.1)
    texts = [one.text for one in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"2.50 x", "4 ranks", "1 rank", "lost to dp", "efficiency"} <= {*texts}


@pytest.mark.parametrize(
    "words",
    [
        ["--ranks", "1,2", "--layouts", "tp=1;tp=2"],
        ["--ranks", "1,2", "--gpus", "2"],
        ["--ranks", "2,2"],
        ["--ranks", "0,2"],
        ["--output", "s.svg"],
    ],
)
def test_what_compares_something_else_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpt_tiny", *words, "--dry-run"]) == 2
    assert "--ranks" in capsys.readouterr().err


def test_a_word_among_the_ranks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "gpt_tiny", "--ranks", "1,two", "--dry-run"])
    assert "'1,two' is not a list of whole numbers, such as 1,2,4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_are_trained_and_compared(tmp_path: Path) -> None:
    ended = run(tmp_path, *TRIAXIS, "bench", "gpt_tiny", "--ranks", "1,2", "--steps", "4", "--output", "s.json")
    assert ended.exit_code == 0, ended.err
    first, second = json.loads((tmp_path / "s.json").read_text())["scaling"]
    assert (first["num_ranks"], second["num_ranks"]) == (1, 2) and second["speed_up"] > 0
    assert second["efficiency"] + sum(second["lost"].values()) == pytest.approx(1)
    assert "speed-up over 1 rank" in ended.out
