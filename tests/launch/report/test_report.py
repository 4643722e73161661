"""`triaxis report`: whole and self-contained HTML from whatever a run left behind, hostile text included, in a real browser."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lacking import give_up
from tests.launch.html_page import Page, self_contained
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import to_yaml
from triaxis.engine.run.entries import events_file
from triaxis.engine.telemetry.outlets.metrics_log import MetricsLog
from triaxis.engine.telemetry.record.events import EventLog
from triaxis.engine.telemetry.record.metrics import StepMetrics
from triaxis.engine.telemetry.timing.time_split import PARTS, TimeSplit
from triaxis.launch import cli
from triaxis.launch.pictures.charts import MOST_POINTS, thinned, ticks
from triaxis.launch.report.page import render
from triaxis.launch.report.parts import loss_over_rate
from triaxis.launch.report.record import RunRecord, read_run

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
TREE: dict[str, Any] = {
    "model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 16, "vocab_size": 257},
    "data": {"synthetic": True},
    "train": {"steps": 60, "global_batch_size": 16},
    "parallel": {"tp": 1, "pp": 2, "vpp": 2, "dp": 2},
    "checkpoint": {"interval": 20},
    "precision": {"dtype": "bf16"},
}
STEP = StepMetrics(
    step=1,
    attempt=0,
    unix_time_seconds=1.7e9,
    consumed_samples=16,
    consumed_tokens=256,
    loss=5.5,
    loss_tokens=256,
    lr=1e-3,
    grad_norm=0.5,
    step_time_seconds=0.25,
    spans_seconds={"data": 0.05, "forward_backward": 0.2},
    tokens_per_second=1024.0,
    model_tflops_per_device=1.5,
    hardware_tflops_per_device=2.0,
    mfu=0.31,
    hfu=0.42,
    peak_memory_bytes=3 * 2**30,
)
DEVICE = "NVIDIA H100 80GB HBM3"
SPLIT = TimeSplit(1, 10, ({part: 0.02 + 0.01 * place for place, part in enumerate(PARTS)},), (0.03,), (0.02,))


def make_run(path: Path, like: StepMetrics = STEP, split: TimeSplit = SPLIT) -> Path:
    """Killed after step 49, resumed at 41, finished: every section has something to show."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(to_yaml(Config.model_validate(TREE), describe=True))
    metrics = MetricsLog(path / "metrics.jsonl")
    for attempt, steps in ((0, range(1, 50)), (1, range(41, 61))):
        events = EventLog(events_file(path, node=0), attempt)
        versions = {"torch": "2.13.0", "python": HOSTILE}
        events.write("attempt_started", layout={"world_size": 4, "nodes": 1, "device": DEVICE, "versions": versions})
        for step in steps:
            made = replace(like, step=step, attempt=attempt, loss=5.5 / step**0.3, consumed_tokens=256 * step)
            if step % 10 == 0:
                made = replace(made, val_loss=5.6 / step**0.3, time_split=split)
            metrics.record(made)
        if attempt == 0:
            events.write("slow_rank", step=30, rank=2, message="rank 2 is slow", host=HOSTILE)
        else:
            events.write("finished", steps=60, peak_memory_bytes=[2**30 * (rank + 1) for rank in range(4)])
        events.close()
    metrics.close()
    (path / "finished").write_text(json.dumps({"steps": 60}))
    (path / "checkpoints" / "step_00000040").mkdir(parents=True)
    return path


def page_of(run: Path) -> Page:
    return self_contained(render(read_run(run), 1.7e9))


@pytest.mark.parametrize(
    ("rates", "is_drawn"), [((1e-5, 1e-4, 1e-3), True), ((1e-5, 2e-5, 3e-5), False), ((1, 10, 9), False)]
)
def test_a_range_test_has_the_loss_over_the_rate(rates: tuple[float, ...], is_drawn: bool, tmp_path: Path) -> None:
    steps = [{"step": place, "lr": rate, "loss": 5.0 - place} for place, rate in enumerate([0.0, *rates])]
    drawn = loss_over_rate(replace(read_run(make_run(tmp_path / "run")), steps=steps))
    assert ("Loss over the learning rate" in drawn) == is_drawn
    assert re.findall(r'text-anchor="middle">(-\d)<', drawn) == (["-5", "-4", "-3"] if is_drawn else [])


def test_context_parallelism_is_next_to_the_parts_of_a_step(tmp_path: Path) -> None:
    """40 ms exposed and 9 ms hidden; each of the parts has a colour of its own."""
    run = make_run(tmp_path / "cut", replace(STEP, cp_imbalance=1.25), replace(SPLIT, hidden_cp=(0.009,)))
    said = page_of(run).sections["time"]
    assert "Calls of context parallelism took 49.0 ms of a step, 9.0 ms of it hidden." in said
    assert "most attention work of a microbatch had 25.0% more than the mean, 25.0% in the most unequal step." in said
    html = render(read_run(run), 1.7e9)
    keys = re.findall(r'<i class="key (c\d+)"></i>', html)
    assert len(keys) == len(set(keys)) == len(PARTS) and all(f"--{key}: #" in html for key in keys)
    plain = page_of(make_run(tmp_path / "whole")).sections["time"]
    assert "context parallelism" not in plain and "attention work" not in plain


def test_a_whole_run_is_a_whole_page(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "demo"))
    assert list(page.ids) and page.sections.keys() >= {
        *(
            "loss",
            "throughput",
            "time",
            "predicted",
            "memory",
            "schedule",
            "checkpoints",
            "attempts",
            "events",
            "versions",
            "config",
        )
    }
    assert "60 of 60" in page.text and "finished" in page.text and "31.0%" in page.text
    assert "Steps that were repeated or lost: 41 to 49 (attempt 1)." in page.sections["loss"]
    assert "it adds up to the step" in page.sections["time"] and "pipeline bubble" in page.sections["time"]
    assert "2.15 GB" in page.sections["memory"] and "Predicted, by kind" in page.sections["memory"]
    share = SPLIT.seconds["bubble"] / SPLIT.step_seconds
    assert (
        f"measured{share:.1%}" in page.sections["schedule"] and "interleaved: pp 2, vpp 2" in page.sections["schedule"]
    )
    assert (
        "step_00000040" in page.sections["checkpoints"]
        and "is not a complete checkpoint" in page.sections["checkpoints"]
    )
    assert "killed: no end is recorded" in page.sections["attempts"] and "41 to 60" in page.sections["attempts"]
    assert "rank 2 is slow" in page.sections["events"] and "2.13.0" in page.sections["versions"]
    assert "hidden_size: 32" in page.sections["config"]
    assert 'class="missing"' not in render(read_run(tmp_path / "demo"), 0.0), "every section has something to show"


def test_text_from_files_is_never_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "<b>demo & 'co'")
    page = page_of(run)
    assert "<b>demo & 'co'" in page.text and HOSTILE in page.sections["events"] and HOSTILE in page.sections["versions"]
    log = EventLog(events_file(run, node=0), 1)
    log.write(HOSTILE, step=3, message=HOSTILE, **{HOSTILE: {HOSTILE: [HOSTILE]}})  # type: ignore[arg-type]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, "attempt": 1, "loss": HOSTILE, "spans_seconds": {HOSTILE: 1.0}}) + "\n")
    (run / "config.yaml").write_text(f"train: {HOSTILE}\n")
    page = page_of(run)
    log.write("hang", step=4, report=f"{HOSTILE}\n" + "x" * 100_000)
    page = page_of(run)
    assert (
        page.text.count(HOSTILE) >= 6
        and "x" * 10_000 in page.sections["events"]
        and "not one of this version" in page.sections["config"]
    )
    monkeypatch.setenv("WANDB_API_KEY", "marker-0123456789")
    log.write("failed", step=5, error="marker-", detail=["marker-", "0123456789"])
    (run / "config.yaml").write_text("# marker-0123456789\n")
    assert "marker-0123456789" not in render(read_run(run), 0.0)


def test_a_run_that_was_killed_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo")
    (run / "finished").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:60]) + lines[60][:40])
    written = events_file(run, node=0)
    events = written.read_text().splitlines(keepends=True)
    written.write_text("".join(events[:-1]) + events[-1][:25])
    record = read_run(run)
    assert (record.state, record.num_unreadable) == ("killed, or still running: no end is recorded", 2)
    assert [each["step"] for each in record.steps] == list(range(1, 52))
    assert [[each["step"] for each in group] for group in record.replaced] == [list(range(41, 50))]
    page = page_of(run)
    assert "2 lines of metrics.jsonl or events/ are incomplete" in page.text
    assert "Only the logging rank's memory is known" in page.sections["memory"]
    EventLog(events_file(run, node=1), 1, rank=2).write("hang", step=52, message="waits for rank 0")
    assert read_run(run).state == "hung"


@pytest.mark.parametrize("kept", ["config.yaml", "metrics.jsonl", "events"])
def test_what_is_not_there_is_said(tmp_path: Path, kept: str) -> None:
    run = make_run(tmp_path / "demo")
    for entry in run.iterdir():
        if entry.name != kept:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    page = page_of(run)
    has_steps = kept == "metrics.jsonl"
    assert ("No step is recorded yet." in page.sections["loss"]) is not has_steps
    assert ("No step is recorded yet." in page.sections["throughput"]) is not has_steps
    assert ("No times are recorded." in page.sections["time"]) is not has_steps
    assert ("No checkpoint is on the disk." in page.sections["checkpoints"]) is True
    assert ("No event is recorded." in page.sections["events"]) is (kept != "events")
    assert ("Unknown without a configuration" in page.sections["schedule"]) is (kept != "config.yaml")
    assert ("there is no config.yaml" in page.sections["config"]) is (kept != "config.yaml")


def test_pipes_and_folders_in_the_place_of_files_hold_no_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo")
    for name, put in (("config.yaml", Path.mkdir), ("finished", os.mkfifo), ("events/node_00000.jsonl", os.mkfifo)):
        (run / name).unlink()
        put(run / name)
    record = read_run(run)
    assert record.results is None and record.events == [] and record.config is None
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert page_of(run).sections["loss"].count("No step is recorded yet.") == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6))
def test_the_history_has_each_step_once_and_forgets_no_record(
    tmp_path_factory: pytest.TempPathFactory, attempts: list[tuple[int, int]]
) -> None:
    """Attempts (or rollbacks) that begin somewhere and make some steps, as resumes do: never past what was made."""
    path, made, reached = tmp_path_factory.getbasetemp() / "history", [], 0
    for number, (first, count) in enumerate(attempts):
        first = min(first, reached + 1)
        reached = first + count - 1
        made += [{"step": step, "attempt": number} for step in range(first, reached + 1)]
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in made))
    run: RunRecord = read_run(path)
    assert [each["step"] for each in run.steps] == list(range(1, reached + 1))
    newest = {each["step"]: each for each in made}
    assert all(each in made and each["attempt"] <= newest[each["step"]]["attempt"] for each in run.steps)
    assert run.steps[-1] == made[-1]
    assert sum(len(group) for group in run.replaced) + len(run.steps) == len(made)
    assert all(one["step"] < two["step"] for group in run.replaced for one, two in pairwise(group))


def test_a_validation_of_the_next_attempt_belongs_to_the_step_that_was_made_before(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step, attempt in ((1, 0), (2, 0), (3, 1)):
        log.record(replace(STEP, step=step, attempt=attempt))
    log.close()
    for attempt, step, loss in ((0, 3, 9.0), (1, 2, 2.5)):
        events = EventLog(events_file(tmp_path, 0), attempt)
        events.write("validation", step=step, val_loss=loss)
        events.close()
    assert [record.get("val_loss") for record in read_run(tmp_path).steps] == [None, 2.5, None]


def test_a_loss_that_is_not_finite_is_a_gap_with_a_mark(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo")
    log = MetricsLog(run / "metrics.jsonl")
    log.record(replace(STEP, step=61, attempt=1, loss=float("nan"), grad_norm=float("inf")))
    log.close()
    page = page_of(run)
    assert "The loss of 1 step is not finite; the first is step 61" in page.sections["loss"]
    assert "training loss is nan at 61" in page.sections["loss"]


def test_long_runs_stay_small_and_keep_their_spikes() -> None:
    points = [(float(step), 1.0) for step in range(200_000)]
    points[123_456] = (123_456.0, 9.0)
    points[77_777] = (77_777.0, float("nan"))
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 2 and (123_456.0, 9.0) in kept
    assert [x for x, y in kept if y != y] == [77_777.0]
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


@settings(deadline=None)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_are_few_round_and_inside(low: float, span: float, most: int) -> None:
    high = low + span
    found = ticks(low, high, most)
    assert len(found) <= most + 1
    slack = 1e-6 * max(abs(low), abs(high), span)
    assert all(low - slack <= tick <= high + slack for tick in found)


def test_the_command_writes_the_page_beside_the_run_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "demo")
    assert cli.main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    assert cli.main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    Page((tmp_path / "page.html").read_text())
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert cli.main(["report", str(run), "--output", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


# In a browser ------------------------------------------------------------------------------------------------------------

SILENT = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
)


@pytest.fixture
def browser() -> str:
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    return found or give_up("no Chromium (apt-get install chromium)")


@pytest.mark.distributed
@pytest.mark.parametrize(("scheme", "width"), [("light", 1240), pytest.param("dark", 420, marks=pytest.mark.slow)])
def test_a_browser_shows_it_without_a_complaint(tmp_path: Path, browser: str, scheme: str, width: int) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow comes with tensorboard, of the extra dev")
    run = make_run(tmp_path / "<b>demo")
    assert cli.main(["report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    shot = tmp_path / "page.png"
    shown = subprocess.run(
        [
            *(browser, *SILENT, f"--user-data-dir={tmp_path / 'profile'}"),
            *(f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", f"--window-size={width},3200"),
            *(f"--screenshot={shot}", (tmp_path / "page.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert shown.returncode == 0 and shot.exists(), shown.stderr
    assert "CONSOLE" not in shown.stderr, "a script ran, or the page's policy refused something"
    picture = image.open(shot).convert("RGB")
    colours = {colour: count for count, colour in picture.getcolors(maxcolors=2**24)}
    page, curve = {"light": ((244, 245, 247), (47, 111, 176)), "dark": ((20, 23, 27), (106, 169, 230))}[scheme]
    assert max(colours, key=lambda colour: colours[colour]) != (0, 0, 0)
    assert colours.get(page, 0) > 50_000, "the page's background"
    assert colours.get(curve, 0) > 2_000, "what is drawn in the first colour: curves, columns and bars"
    margin = picture.crop((width - 8, 0, width, picture.height))
    assert [colour for _, colour in margin.getcolors()] == [page], "nothing sticks out of its card"
