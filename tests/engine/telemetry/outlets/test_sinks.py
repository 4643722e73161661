"""wandb and TensorBoard, written and read back; wandb without key or network never stops a run."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triaxis.engine.config.tree import Config
from triaxis.engine.errors import TriaxisError
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.run.entries import OLD_FILE
from triaxis.engine.step_result import StepResult
from triaxis.engine.telemetry.meters.result_numbers import LossesAhead, LossScales
from triaxis.engine.telemetry.outlets.charts import X_AXES, Charts
from triaxis.engine.telemetry.outlets.hub import Telemetry
from triaxis.engine.telemetry.outlets.tensorboard import TensorBoardSink
from triaxis.engine.telemetry.outlets.wandb import WandbSink, ending_its_process_after
from triaxis.engine.telemetry.record.events import EventLog
from triaxis.engine.telemetry.record.metrics import StepMetrics
from triaxis.engine.telemetry.timing.time_split import PARTS, TimeSplit

MakeConfig = Callable[..., Config]
MakeMetrics = Callable[..., StepMetrics]
WANDB = {"wandb": {"project": "triaxis-tests", "tags": ["a", "b"]}}


EIGHT = {"tp": 2, "pp": 2, "dp": 2, "cp": 1, "ep": 1}


def test_charts_have_everything_that_is_known_in_four_groups(
    make_config: MakeConfig, make_metrics: MakeMetrics
) -> None:
    split = TimeSplit(1, 3, (dict.fromkeys(PARTS, 0.125),), (0.05,), (0.125,))
    charts = Charts.of_run(make_config(), EIGHT)
    values = charts.of(make_metrics(step=3, mfu=0.5, val_loss=2.0, cp_imbalance=1.25, time_split=split))
    assert values["health/cp_imbalance"] == 1.25 and values["learning/val_loss"] == 2.0 and values["speed/mfu"] == 0.5
    assert values["learning/lr"] == 1e-3 and values["memory/peak_gib"] == 1.0
    assert values["speed/share_bubble"] == values["speed/share_tp"] == pytest.approx(1 / len(PARTS))
    assert {name.split("/")[0] for name in values} == {"learning", "speed", "memory", "health"}
    assert {"learning/val_loss", "speed/mfu", "speed/hfu", "health/cp_imbalance"}.isdisjoint(charts.of(make_metrics()))
    assert {"cp_imbalance", "losses_ahead"}.isdisjoint(make_metrics().to_record())


def test_charts_that_could_only_be_flat_are_left_out(make_config: MakeConfig, make_metrics: MakeMetrics) -> None:
    split = TimeSplit(1, 3, (dict.fromkeys(PARTS, 0.125),), (0.05,), (0.125,))
    config = make_config()
    tokens = config.train.global_batch_size * config.model.seq_length
    whole = make_metrics(time_split=split, loss_tokens=tokens)
    of_eight = Charts.of_run(config, EIGHT).of(whole)
    assert {"speed/share_cp", "speed/share_ep", "speed/share_host_read", "learning/counted_tokens"}.isdisjoint(of_eight)
    of_one = Charts.of_run(config, dict.fromkeys(EIGHT, 1)).of(whole)
    shares = {name for name in of_one if name.startswith("speed/share_")}
    assert shares == {f"speed/share_{part}" for part in ("compute", "optimizer", "data", "checkpoint", "other")}
    assert not {"step", "attempt"} & {name.rpartition("/")[2] for name in of_eight}
    masked = make_metrics(loss_tokens=tokens - 1)
    assert Charts.of_run(config, EIGHT).of(masked)["learning/counted_tokens"] == tokens - 1


def test_a_megatron_users_panels_keep_their_names(make_config: MakeConfig, make_metrics: MakeMetrics) -> None:
    config = make_config(telemetry={"names": "megatron"})
    values = Charts.of_run(config, EIGHT).of(make_metrics(loss=3.0, val_loss=2.0))
    names = {"lm loss", "lm loss validation", "learning-rate", "grad-norm", "iteration-time", "throughput"}
    assert names <= set(values) and values["lm loss"] == 3.0
    assert {"learning/loss", "learning/lr", "speed/step_seconds"}.isdisjoint(values)
    assert "memory/peak_gib" in values, "what Megatron-LM does not log keeps our name"


def test_losses_of_tokens_ahead_are_named_by_distance(make_config: MakeConfig, make_metrics: MakeMetrics) -> None:
    ahead = LossesAhead()
    metrics = make_metrics(measured=[ahead.read(0, StepResult(3.0, 0.5, 100, ahead=(2.5, 3.25)))])
    values = Charts.of_run(make_config(), {}).of(metrics)
    assert (values["learning/loss_ahead_1"], values["learning/loss_ahead_2"]) == (2.5, 3.25)
    assert metrics.to_record()["losses_ahead"] == (2.5, 3.25)
    assert metrics.measured[0].line == "losses of tokens ahead 2.5000 3.2500"
    (one,) = filter(None, [ahead.read(1, StepResult(3.0, 0.5, 100, ahead=(2.5,)))])
    assert one.line == "loss of tokens ahead 2.5000" and ahead.read(2, StepResult(3.0, 0.5, 100)) is None


def test_the_loss_scale_is_named_where_there_is_one(make_config: MakeConfig, make_metrics: MakeMetrics) -> None:
    scales = LossScales()
    metrics = make_metrics(measured=[scales.read(0, StepResult(3.0, 0.5, 100, loss_scale=65536.0, skip="overflowed"))])
    values = Charts.of_run(make_config(), {}).of(metrics)
    assert (values["learning/loss_scale"], values["health/num_overflows"]) == (65536.0, 1)
    assert metrics.to_record()["loss_scale"] == 65536.0 and metrics.to_record()["num_overflows"] == 1
    assert metrics.measured[0].line == "loss scale 65536, 1 overflow"
    (first,) = filter(None, [LossScales().read(0, StepResult(3.0, 0.5, 100, loss_scale=2.0**40))])
    assert first.line == "loss scale 1.099511628e+12, 0 overflows"
    assert scales.read(1, StepResult(3.0, 0.5, 100)) is None


@pytest.fixture
def wandb_process(bare_wandb: None) -> Iterator[None]:
    """The real wandb, whose process is gone after the test."""
    yield
    import wandb

    with ending_its_process_after(20.0):
        wandb.teardown()


def test_a_process_of_wandb_that_never_ends_is_ended(tmp_path: Path) -> None:
    stuck = tmp_path / "wandb-core"
    shutil.copy("/bin/sleep", stuck)
    bystander = subprocess.Popen(["sleep", "60"])
    process = subprocess.Popen([str(stuck), "60"])
    with ending_its_process_after(0.1):
        assert process.wait(timeout=30) == -signal.SIGKILL
    assert bystander.poll() is None, "only wandb's process is ended"
    bystander.kill()
    bystander.wait()


def records(folder: Path) -> list[dict[str, Any]]:
    """What wandb wrote, by its own reader."""
    shown = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in shown.stdout.splitlines()]


def test_without_a_key_the_run_is_offline_and_whole(
    make_config: MakeConfig, run: RunDirectory, make_metrics: MakeMetrics, wandb_process: None
) -> None:
    sink = WandbSink(make_config(telemetry=WANDB), run, {"tp": 2, "dp": 4})
    assert (sink.mode, sink.why, sink.url) == ("offline", "no API key", None)
    sink.record(make_metrics(step=1))
    sink.record(make_metrics(step=2, loss=1.5, val_loss=2.5))
    EventLog(run.events(0), 0).write("non_finite", step=2, message="loss is nan")
    sink.close()

    (folder,) = (run.path / "wandb").glob("offline-run-*")
    kept_id = run.wandb_id.read_text()
    assert folder.name.endswith(kept_id)
    written = records(folder)
    (first,) = [record["run"] for record in written if record["type"] == "run"]
    assert (first["project"], first["run_id"], first["display_name"]) == ("triaxis-tests", kept_id, "demo")
    assert first["config"]["update"]["layout"] == {"dp": 4, "tp": 2}
    assert first["config"]["update"]["model"]["hidden_size"] == 32
    assert sink.sync_command == f"wandb sync {run.path}/wandb/offline-run-*-{kept_id}"
    history = [json.dumps(record["history"]) for record in written if record["type"] == "history"]
    assert len(history) == 2 and "val_loss" not in history[0] and "val_loss" in history[1]
    assert any('"step"' in json.dumps(record) for record in written if record["type"] == "metric")
    (alert,) = [record["alert"] for record in written if record["type"] == "alert"]
    assert (alert["title"], alert["level"]) == ("demo: non_finite", "ERROR")


class FakeWandb:
    """As much of wandb as the sink calls. Online fails where it is told to; a second init needs a teardown, as in 0.31."""

    def __init__(self, *, key: bool, online_works: bool) -> None:
        self.Settings = type("Settings", (SimpleNamespace,), {"model_fields": {"init_timeout": 0, "finish_timeout": 0}})
        self.inits: list[dict[str, Any]] = []
        self._key, self._online_works, self._is_used = key, online_works, False

    def setup(self, settings: object) -> None:
        pass

    def login(self, *, prompt: bool = True) -> bool:
        assert not prompt, "nobody may be asked"
        return self._key

    def teardown(self) -> None:
        self._is_used = False

    def init(self, **arguments: Any) -> Any:
        if self._is_used:
            raise RuntimeError("the id is in use")
        self._is_used = True
        self.inits.append(arguments)
        self.cache_dir = os.environ.get("WANDB_CACHE_DIR")
        if arguments["mode"] == "online" and not self._online_works:
            raise TimeoutError("no network\nwith details")
        return FakeRun()


class FakeRun:
    """What it was told."""

    url = "https://wandb/run"

    def __init__(self) -> None:
        self.axes: dict[str, str | None] = {}
        self.history: list[dict[str, float]] = []
        self.alerts: list[tuple[str, str, str]] = []
        self.num_preempted = 0
        self.is_finished = False

    def define_metric(
        self, name: str, step_metric: str | None = None, summary: str | None = None, hidden: bool = False
    ) -> None:
        self.axes[name] = "hidden" if hidden else step_metric

    def log(self, values: dict[str, float]) -> None:
        self.history.append(values)

    def alert(self, title: str, text: str, level: str) -> None:
        assert len(title) < 64, "wandb's limit"
        self.alerts.append((title, text, level))

    def mark_preempting(self) -> None:
        self.num_preempted += 1

    def finish(self) -> None:
        self.is_finished = True


def open_fake(
    fake: FakeWandb, config: Config, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> tuple[WandbSink, dict[str, Any]]:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    sink = WandbSink(config, run, {})
    return sink, fake.inits[-1]


def test_a_key_and_a_network_are_online_with_bounded_waits(
    make_config: MakeConfig, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, bare_wandb: None
) -> None:
    fake = FakeWandb(key=True, online_works=True)
    sink, init = open_fake(fake, make_config(telemetry=WANDB), run, monkeypatch)
    assert (sink.mode, sink.url, init["mode"]) == ("online", "https://wandb/run", "online")
    assert init["settings"].init_timeout <= 30 and init["settings"].finish_timeout <= 60
    assert init["settings"].console == "off"
    assert init["id"] == run.wandb_id.read_text() and init["resume"] == "allow"
    assert init["tags"] == ["a", "b"] and init["dir"] == str(run.path)


def test_all_attempts_are_one_run(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_wandb: None
) -> None:
    config, ids = make_config(telemetry=WANDB), set()
    for name in ("demo", "demo", "another"):
        run = RunDirectory.create(config, tmp_path, name)
        _, init = open_fake(FakeWandb(key=True, online_works=True), config, run, monkeypatch)
        ids.add((name, init["id"]))
        run.close()
    assert len(ids) == 2 and len({kept_id for _, kept_id in ids}) == 2


def test_a_network_that_fails_is_offline_with_the_reason(
    make_config: MakeConfig, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, bare_wandb: None
) -> None:
    fake = FakeWandb(key=True, online_works=False)
    sink, init = open_fake(fake, make_config(telemetry=WANDB), run, monkeypatch)
    assert (sink.mode, sink.why, sink.url) == ("offline", "online failed: no network", None)
    assert [init["mode"] for init in fake.inits] == ["online", "offline"]
    assert fake.inits[0]["id"] == init["id"]


def test_charts_are_drawn_against_steps_and_no_replayed_step_is_lost(
    make_config: MakeConfig,
    run: RunDirectory,
    make_metrics: MakeMetrics,
    monkeypatch: pytest.MonkeyPatch,
    bare_wandb: None,
) -> None:
    sink, _ = open_fake(FakeWandb(key=True, online_works=True), make_config(telemetry=WANDB), run, monkeypatch)
    told: Any = sink._run
    assert told.axes["*"] == told.axes["learning/val_loss"] == "step"
    assert {name for name, axis in told.axes.items() if axis == "hidden"} == {*X_AXES}, "no chart of a straight line"
    for step, attempt in ((1, 0), (2, 0), (2, 1), (3, 1)):
        sink.record(make_metrics(step=step, attempt=attempt, loss=3.0 / step))
    assert [(each["step"], each["attempt"]) for each in told.history] == [(1, 0), (2, 0), (2, 1), (3, 1)]
    assert [each["learning/loss"] for each in told.history] == [3.0, 1.5, 1.5, 1.0]
    assert "learning/val_loss" not in told.history[0]


def test_trouble_is_alerted_once_whichever_rank_and_attempt_wrote_it(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bare_wandb: None,
    make_metrics: MakeMetrics,
) -> None:
    config, key = make_config(telemetry=WANDB), "k" * 40
    monkeypatch.setenv("WANDB_API_KEY", key)
    run = RunDirectory.create(config, tmp_path, "demo")
    sink, _ = open_fake(FakeWandb(key=True, online_works=True), config, run, monkeypatch)
    told: Any = sink._run
    mine, other = EventLog(run.events(0), 0), EventLog(run.events(1), 0, rank=3)
    mine.write("validation", step=5, val_loss=2.0)
    mine.write("non_finite", step=6, message=f"loss is nan, says {key}", loss=float("nan"))
    sink.after_event()
    sink.after_event()
    assert [(title, level) for title, _, level in told.alerts] == [("demo: non_finite", "ERROR")]
    assert "loss is nan" in told.alerts[0][1] and "step 6, attempt 1" in told.alerts[0][1]
    assert key not in told.alerts[0][1]
    mine.write("stopped", step=7, reason="preempted")
    sink.record(make_metrics())
    assert (told.alerts[-1][0], told.num_preempted) == ("demo: stopped", 1)
    other.write("hang", step=8, message="waits for all_reduce")  # and the job is killed
    run.close()

    run = RunDirectory.create(config, tmp_path, "demo")
    sink, _ = open_fake(FakeWandb(key=True, online_works=True), config, run, monkeypatch)
    sink.record(make_metrics(attempt=1))
    sink.close()
    later: Any = sink._run
    assert [(title, level) for title, _, level in later.alerts] == [("demo: hang", "ERROR")]
    assert "waits for all_reduce (step 8, rank 3, attempt 1, " in later.alerts[0][1]


def test_alerts_go_on_where_a_run_of_one_file_has_stopped(
    make_config: MakeConfig, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, bare_wandb: None
) -> None:
    """An earlier version had alerted of the first line, and marked the bytes of its only file."""
    EventLog(run.path / OLD_FILE, 0).write("loss_spike", step=4)
    run.wandb_alerted.write_text(str((run.path / OLD_FILE).stat().st_size))
    EventLog(run.path / OLD_FILE, 0).write("non_finite", step=5)
    EventLog(run.events(0), 1).write("hang", step=6)
    sink, _ = open_fake(FakeWandb(key=True, online_works=True), make_config(telemetry=WANDB), run, monkeypatch)
    told: Any = sink._run
    for _ in range(2):
        sink.after_event()
        assert [title for title, _, _ in told.alerts] == ["demo: non_finite", "demo: hang"]


@pytest.mark.parametrize("marked", [b"", b"\xff", b"[1]", b'{"events/node_00000.jsonl": "far"}', b"-5"])
def test_a_damaged_mark_alerts_once_more(
    make_config: MakeConfig, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, bare_wandb: None, marked: bytes
) -> None:
    EventLog(run.events(0), 0).write("non_finite", step=5)
    run.wandb_alerted.write_bytes(marked)
    sink, _ = open_fake(FakeWandb(key=True, online_works=True), make_config(telemetry=WANDB), run, monkeypatch)
    told: Any = sink._run
    sink.after_event()
    assert [title for title, _, _ in told.alerts] == ["demo: non_finite"]


def test_a_run_that_hangs_alerts_and_finishes_before_it_is_ended(
    make_config: MakeConfig, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, bare_wandb: None
) -> None:
    sink, _ = open_fake(FakeWandb(key=True, online_works=True), make_config(telemetry=WANDB), run, monkeypatch)
    told: Any = sink._run
    telemetry = Telemetry(None, EventLog(run.events(0), 0), [sink])
    EventLog(run.events(0), 0, rank=0).write("hang", step=8, message="rank 3 waits", report="long\n" * 100)
    thread = threading.Thread(target=telemetry.close_early)
    thread.start()
    thread.join()
    ((title, text, level),) = told.alerts
    assert (title, level, told.is_finished) == ("demo: hang", "ERROR", True)
    assert "rank 3 waits" in text and len(text) < 200, "a mail, not the whole report"


def test_wandbs_own_cache_stays_in_the_run_directory(
    make_config: MakeConfig, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, bare_wandb: None
) -> None:
    fake = FakeWandb(key=True, online_works=True)
    open_fake(fake, make_config(telemetry=WANDB), run, monkeypatch)
    assert fake.cache_dir == str(run.path / "wandb" / "cache") and "WANDB_CACHE_DIR" not in os.environ
    monkeypatch.setenv("WANDB_CACHE_DIR", "/theirs")
    open_fake(fake := FakeWandb(key=True, online_works=True), make_config(telemetry=WANDB), run, monkeypatch)
    assert fake.cache_dir == "/theirs"


def test_an_id_that_would_leave_the_folder_is_refused(
    make_config: MakeConfig, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, bare_wandb: None
) -> None:
    run.wandb_id.write_text("../../elsewhere")
    with pytest.raises(TriaxisError, match="not a run's id"):
        open_fake(FakeWandb(key=True, online_works=True), make_config(telemetry=WANDB), run, monkeypatch)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WANDB_MODE": "disabled"}, {"mode": "disabled"}),
        ({"WANDB_MODE": "offline"}, {"mode": "offline"}),
        ({"WANDB_DISABLED": "true"}, {"mode": "disabled"}),
        ({"WANDB_PROJECT": "p", "WANDB_ENTITY": "e", "WANDB_NAME": "n"}, {"project": "p", "entity": "e", "name": "n"}),
        ({"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, {"id": "mine", "resume": "must"}),
        ({"WANDB_TAGS": "x,y", "WANDB_DIR": "/elsewhere"}, {"tags": ["x", "y"], "dir": "/elsewhere"}),
    ],
)
def test_the_environment_is_honoured(
    variables: dict[str, str],
    expected: dict[str, object],
    make_config: MakeConfig,
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    bare_wandb: None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    fake = FakeWandb(key=True, online_works=True)
    _, init = open_fake(fake, make_config(telemetry=WANDB), run, monkeypatch)
    assert {name: init[name] for name in expected} == expected


def test_limits_that_the_user_set_are_left_to_wandb(
    make_config: MakeConfig, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, bare_wandb: None
) -> None:
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "300")
    _, init = open_fake(FakeWandb(key=True, online_works=True), make_config(telemetry=WANDB), run, monkeypatch)
    assert not hasattr(init["settings"], "init_timeout")


@pytest.mark.slow
@pytest.mark.distributed
def test_the_real_wandb_without_a_network_goes_offline_in_bounded_time(
    make_config: MakeConfig,
    run: RunDirectory,
    make_metrics: MakeMetrics,
    monkeypatch: pytest.MonkeyPatch,
    wandb_process: None,
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # refuses: nobody listens there
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    sink = WandbSink(make_config(telemetry=WANDB), run, {})
    assert sink.mode == "offline" and sink.why.startswith("online failed")
    sink.record(make_metrics())
    sink.close()
    assert list((run.path / "wandb").glob("offline-run-*"))


def test_tensorboard_has_the_same_names_against_the_step(
    make_config: MakeConfig, run: RunDirectory, make_metrics: MakeMetrics
) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    charts = Charts.of_run(make_config(), EIGHT)
    for number, steps in enumerate([(1, 2, 3, 4, 5, 2, 3), (2, 3)]):  # a rollback in the first, a crash behind step 1
        sink = TensorBoardSink(run, charts)
        for step in steps:
            sink.record(make_metrics(step=step, loss=step / 2))
        sink.close()
        for path in run.tensorboard.glob("events.*"):
            path.rename(path.with_name(f"events.{number}.tfevents") if path.name[7] == "o" else path)
    events = event_accumulator.EventAccumulator(str(run.tensorboard))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("learning/loss")]
    assert points == [(1, 0.5), (2, 1.0), (3, 1.5)], "a step that was made again stands once"
    assert set(charts.of(make_metrics())) == set(events.Tags()["scalars"])
