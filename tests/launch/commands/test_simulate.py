"""`triaxis simulate` as a user types it."""

import json
import re
from pathlib import Path

import pytest

from triaxis.engine.config.load import load_config
from triaxis.engine.config.plan import parallel_sizes
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.actions import Action
from triaxis.engine.pipeline.lowering import lower
from triaxis.engine.pipeline.simulate import Costs
from triaxis.engine.pipeline.simulate_program import simulate_program
from triaxis.launch.cli import main
from triaxis.launch.simulate import page

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "configs" / "gpt_tiny.yaml")
DOCUMENTS = ["data.attention=within", "data.synthetic=true", "data.synthetic_document_length=64"]


def test_of_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--pp", "2", "--microbatches", "2", "--forward", "3", "--input-grad", "2", "--transfer", "2"]
    assert main(["simulate", *sizes]) == 0
    lines = capsys.readouterr().out.splitlines()
    # tests/engine/pipeline/test_simulate_program.py has this one by hand.
    assert lines[0] == "1f1b, pp 2, vpp 1, 2 microbatches, early receives; unit of time: as in --forward"
    assert lines[1] == "span 22.00, bubble 45.45% of it on the rank that waits most"
    assert [line.split() for line in lines[2:5]] == [
        ["rank", "busy", "bubble", "messages", "in", "flight"],
        ["0", "54.5%", "27.3%", "18.2%", "2"],
        ["1", "54.5%", "36.4%", "9.1%", "1"],
    ]
    assert lines[5] == "critical path: forward 40.9%, transfers 18.2%, backward 40.9%"
    assert lines[6:11] == [
        "  0.00 to 3.000  rank 0: 0F0",
        "  3.000 to 5.000  activation of microbatch 0 for stage 1 (rank 0 to 1)",
        "  5.000 to 17.00  rank 1: 0F0 0B0 0F1 0B1",
        "  17.00 to 19.00  gradient of microbatch 1 for stage 0 (rank 1 to 0)",
        "  19.00 to 22.00  rank 0: 0B1",
    ]
    assert lines[11].startswith("rank 0 |F0")


def test_late_receives_and_posts_cost_time(capsys: pytest.CaptureFixture[str]) -> None:
    def span(*more: str) -> float:
        assert main(["simulate", "--pp", "3", "--microbatches", "6", "--transfer", "0.5", *more]) == 0
        found = re.search(r"span ([\d.]+), bubble", capsys.readouterr().out)
        assert found is not None
        return float(found[1])

    assert span() < span("--receives", "late")
    assert span() < span("--post", "0.1")


def test_of_a_config_and_its_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert main(["simulate", TINY, "--out", str(out), "parallel.vpp=1", "schedule.name=zb_h1"]) == 0
    assert "forwards of a mean layer (by FLOPs)" in capsys.readouterr().out
    text = out.read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=|https?:", text), "the page loads nothing"
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    for rank, row in enumerate(schedules.build("zb_h1", 2, 1, 4).actions):
        assert [Action.parse(f"{each[3]}{each[2]}{each[4]}") for each in data["rows"][rank]] == list(row)
    ends = [each[1] for row in data["rows"] for each in row]
    assert max(ends) == data["span"] and any(each[5] for row in data["rows"] for each in row)
    assert max(number for _, number in data["flight"][0]) == 2 and max(number for _, number in data["held"][1]) == 2


def test_documents_spread_the_span(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", TINY, "--documents", "20", *DOCUMENTS]
    assert main(words) == 0
    out = capsys.readouterr().out
    found = re.search(
        r"of 20 drawn steps \(seed 1\): span median ([\d.]+), 95 % at most ([\d.]+), largest ([\d.]+)", out, re.I
    )
    assert found is not None, out
    middle, high, most = map(float, found.groups())
    assert middle < high <= most
    assert main(words) == 0 and capsys.readouterr().out == out, "the same draws again"
    assert main([*words, "--seed", "2"]) == 0 and capsys.readouterr().out != out


def write_run(run: Path, scale: float) -> float:
    """Write a traced step of gpt_tiny's schedule, every action `scale` seconds times its cost; returns the span in seconds."""
    config = load_config(TINY, [], {}, world_size=None)
    run.mkdir()
    (run / "config.yaml").write_text(Path(TINY).read_text())
    schedule = schedules.of_step(config, parallel_sizes(config), 0)
    timeline = simulate_program(lower(schedule), Costs.uniform(4, scale, scale, scale))
    folder = run / "timeline" / "attempt_00"
    folder.mkdir(parents=True)
    for rank, row in enumerate(timeline.intervals):
        events = [
            {"ph": "M", "name": "thread_name", "args": {"name": f"rank {4 * rank}  pp {rank}, dp 0, tp 0  host"}},
            {"ph": "X", "name": "step 7", "cat": "step", "ts": 0.0, "dur": timeline.span * 1e6},
        ]
        for each in row:
            start, length = each.start * 1e6, (each.end - each.start) * 1e6
            events.append({"ph": "X", "name": str(each.action), "cat": "action", "ts": start, "dur": length})
        content = {"traceEvents": events, "otherData": {"world_size": 8, "clock_error_seconds": 0.0}}
        (folder / f"rank_{4 * rank:05d}.json").write_text(json.dumps(content))
    return timeline.span


def test_a_measured_step_beside_the_simulated_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    span = write_run(tmp_path / "run", 0.25)
    out = tmp_path / "page.html"
    assert main(["simulate", "--measured", str(tmp_path / "run"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "unit of time: seconds" in printed
    assert f"measured in step 7: span {span:.3f}; simulated +0.0%" in printed
    data = json.loads(out.read_text().partition('id="data">')[2].partition("</script>")[0])
    assert [[each[:5] for each in row] for row in data["rows"]] == data["measured"]
    assert main(["simulate", "--measured", str(tmp_path / "run"), "train.global_batch_size=128"]) == 2
    assert "measured other actions on pipeline rank 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pp", "2"], "--microbatches not given"),
        ([TINY, "--pp", "2", "--forward", "2"], "together with --pp, --forward"),
        (["--pp", "2", "--microbatches", "2", "--documents", "3"], "--documents without a config"),
        (["--pp", "2", "--microbatches", "2", "--forward", "-1"], "a cost of -1"),
        (["--pp", "2", "--microbatches", "2", "--latency", "1"], "a latency of 1 of transfers that take 0"),
        (["--pp", "2", "--microbatches", "2", "--out", "x.png"], "such as x.html"),
        ([TINY, "--documents", "3"], "--documents with data.attention=across"),
        ([TINY, "--documents", "0"], "--documents 0: must be at least 1"),
        (["--measured", "nowhere"], "nowhere holds no config.yaml"),
        (
            ["--pp", "1", "--microbatches", "1", "--forward", "0", "--input-grad", "0", "--weight-grad", "0"],
            "every action takes no time",
        ),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_page_has_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MOST_ACTIONS", 7)
    out = tmp_path / "page.html"
    assert main(["simulate", "--pp", "2", "--microbatches", "2", "--out", str(out)]) == 2
    assert "8 actions do not fit a page" in capsys.readouterr().err and not out.exists()
