"""Logs to Weights & Biases, in one run over all attempts, without blocking training.

    variable or key                mode
    WANDB_MODE, WANDB_DISABLED     as set, unless it is online
    no API key                     offline, without a prompt
    an API key                     online; offline if wandb cannot go online within its time limit

    learning/loss  speed/mfu ...      the charts in `charts.py`, against the step or consumed_tokens
    alerts                            the events in `events.ALERTS`, whichever rank wrote them

The mode is always set, because wandb 0.31 with a key but no network waits for 100 seconds and then fails. The run directory keeps
the wandb run's id, so that the next attempt continues that run. Offline attempts create new folders with the same id, and `wandb
sync` joins them. wandb's own step counter is not used. A step that a resume repeats adds a second point at the same step, with
another attempt number.

wandb 0.31 writes to the disk about every 15 seconds. If a job is killed, the last seconds are in metrics.jsonl alone.
"""

import inspect
import json
import os
import re
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil

from triaxis.engine.config.schema.telemetry import WandbConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import TriaxisError, attempt_name
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.run.entries import OLD_FILE
from triaxis.engine.storage.files import write_atomically
from triaxis.engine.storage.json_text import parse_json
from triaxis.engine.storage.redaction import tree_without_secrets, without_secrets
from triaxis.engine.storage.state_files import read_regular
from triaxis.engine.telemetry.outlets.charts import X_AXES, Charts
from triaxis.engine.telemetry.outlets.sink import Announcement, Sink
from triaxis.engine.telemetry.record.events import ALERTS, Event, read_events
from triaxis.engine.telemetry.record.metrics import StepMetrics

_DEFAULTS: Mapping[str, float] = {"init_timeout": 20.0, "finish_timeout": 60.0}
"""Time limits for wandb in seconds, unless WANDB_INIT_TIMEOUT or WANDB_FINISH_TIMEOUT is set. wandb's own: 90 and no limit."""

_MOST_CHARACTERS = 300
"""Largest number of characters in a detail that an alert includes."""

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

_TEARDOWN_SECONDS = 10.0
_CLOSE_SECONDS = 90.0
"""Time limits after which wandb's own process is ended, since it was seen to outlive its own limits."""


class WandbSink(Sink):
    """Sink that logs each step to wandb.

    Args:
        config: run configuration, recorded whole.
        directory: run directory, which holds `wandb_id` and `wandb/`.
        layout: parallel sizes and other fields to filter by; recorded with the config.

    Attributes:
        mode: resolved mode: online, offline or disabled.
        why: reason for a mode other than online; "" if online.
        url: the run's URL; None unless the mode is online.
        sync_command: command that uploads all attempts' offline data; None unless the mode is offline.

    Raises:
        Exception: wandb's error if not even offline works.
    """

    name = "wandb"
    opens_again = False

    def __init__(self, config: Config, directory: RunDirectory, layout: Mapping[str, Any]) -> None:
        assert config.telemetry.wandb is not None, "telemetry.wandb is set"
        import wandb

        arguments = _arguments(config.telemetry.wandb, directory)
        arguments["config"] = tree_without_secrets({**config.model_dump(mode="json"), "layout": dict(layout)})
        with _cache_in(directory), _words_without_secrets():
            self._run, self.mode, self.why = _start(wandb, _settings(wandb), arguments)
        self.url: str | None = self._run.url if self.mode == "online" else None
        self.sync_command = _sync_command(arguments["dir"], arguments["id"]) if self.mode == "offline" else None
        self.announcement = Announcement(
            "wandb",
            {"mode": self.mode, "why": self.why, "url": self.url, "sync_command": self.sync_command},
            f"wandb: {self.url}" if self.url is not None else f"wandb is {self.mode}: {self.why}",
        )
        if self.sync_command is not None:
            self.summary = f"wandb kept the run on disk ({self.why}); to upload it: {self.sync_command}"
        self._charts = Charts.of_run(config, layout)
        for name in X_AXES:
            self._run.define_metric(name, hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric(self._charts.name("learning/val_loss"), step_metric="step", summary="min,last")
        self._alerts = _Alerts(self._run, directory)

    @classmethod
    def open(cls, config: Config, directory: RunDirectory, layout: Mapping[str, Any]) -> Self:
        return cls(config, directory, layout)

    def record(self, metrics: StepMetrics) -> None:
        """Hand the values and new alerts to wandb's own process, without waiting for a network."""
        self._run.log({name: getattr(metrics, name) for name in X_AXES} | self._charts.of(metrics))
        self._alerts.send()

    def after_event(self) -> None:
        """Send alerts for the events written since the last call. Any thread may call this."""
        self._alerts.send()

    def close(self) -> None:
        self.close_early(_CLOSE_SECONDS)

    def close_early(self, limit_seconds: float) -> None:
        """Send the last alerts and let wandb finish. Any thread may call this.

        wandb's own process is killed after `limit_seconds`.
        """
        with ending_its_process_after(limit_seconds):
            self._alerts.send()
            self._run.finish()


class _Alerts:
    """Sends one alert per event in `ALERTS`, for all ranks and earlier attempts too."""

    def __init__(self, run: Any, directory: RunDirectory) -> None:
        self._run = run
        self._directory, self._marker = directory.path, directory.wandb_alerted
        self._name = directory.path.name
        self._lock = threading.Lock()
        self._ends: Mapping[str, int] = _alerted(self._marker)

    def send(self) -> None:
        with self._lock:
            read = read_events(self._directory, self._ends)
            told = [event for event in read.events if event.kind in ALERTS]
            self._ends = read.ends
            if told:
                write_atomically(self._marker, [json.dumps(read.ends).encode()])
            for event in told:
                self._run.alert(
                    f"{self._name}: {event.kind}"[:63], without_secrets(_in_words(event)), level=ALERTS[event.kind]
                )
                if event.details.get("reason") == "preempted":
                    self._run.mark_preempting()


def _alerted(marker: Path) -> Mapping[str, int]:
    """Read how many bytes of each event file have had their alerts sent.

    If the marker is missing or damaged, all alerts are sent once more. Older runs had one event file, and their marker holds a
    single number.
    """
    try:
        held = parse_json(read_regular(marker))
    except (OSError, ValueError):
        return {}
    ends = held if isinstance(held, dict) else {OLD_FILE: held}
    return {name: end for name, end in ends.items() if type(end) is int and end >= 0}


def _in_words(event: Event) -> str:
    """Describe an event for a mail or a chat, without details longer than `_MOST_CHARACTERS`."""
    at = f"step {event.step:,}, " if event.step is not None else ""
    rank = f"rank {event.rank}, " if event.rank is not None else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(event.unix_time_seconds))
    values = {name: str(value) for name, value in event.details.items()}
    details = ", ".join(f"{name} {value}" for name, value in values.items() if len(value) <= _MOST_CHARACTERS)
    return f"{'; '.join(part for part in (event.message, details) if part)} ({at}{rank}{attempt_name(event.attempt)}, {when})"


def _sync_command(folder: str, run_id: str) -> str:
    """Build the shell command that uploads one wandb run's offline folders, oldest first."""
    return f"wandb sync {shlex.quote(folder)}/wandb/offline-run-*-{shlex.quote(run_id)}"


@contextmanager
def _cache_in(directory: RunDirectory) -> Iterator[None]:
    """Keep new wandb processes' cache and logs in the run directory, within the block."""
    name = "WANDB_CACHE_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = str(directory.path.resolve() / "wandb" / "cache")
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def _words_without_secrets() -> Iterator[None]:
    """Redact secrets in `sys.argv` within the block, because wandb uploads the command line."""
    words = sys.argv
    sys.argv = [without_secrets(word) for word in words]
    try:
        yield
    finally:
        sys.argv = words


def _start(wandb: Any, settings: Any, arguments: dict[str, Any]) -> tuple[Any, str, str]:
    """Start the wandb run. Return the run, its mode, and the reason for not being online."""
    given = os.environ.get("WANDB_MODE") or ("disabled" if os.environ.get("WANDB_DISABLED") == "true" else "online")
    if given != "online":
        return wandb.init(mode=given, settings=settings, **arguments), given, "set by WANDB_MODE or WANDB_DISABLED"
    why = "no API key"
    try:
        wandb.setup(settings=settings)
        if _has_key(wandb):
            return wandb.init(mode="online", settings=settings, **arguments), "online", ""
    except Exception as error:
        why = without_secrets(f"online failed: {(str(error) or type(error).__name__).splitlines()[0]}")
        with suppress(Exception), ending_its_process_after(_TEARDOWN_SECONDS):
            wandb.teardown()  # its process may still hold the id, and would refuse a second init
    return wandb.init(mode="offline", settings=settings, **arguments), "offline", why


@contextmanager
def ending_its_process_after(limit_seconds: float) -> Iterator[None]:
    """Kill wandb's own process if the block takes longer than `limit_seconds`."""
    timer = threading.Timer(limit_seconds, _end_service)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_service() -> None:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if child.name().startswith("wandb"):
                child.kill()


def _has_key(wandb: Any) -> bool:
    """Whether wandb finds an API key without a prompt. wandb may verify the key, which takes seconds.

    Raises:
        Exception: wandb has found a key and cannot use it.
    """
    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False))
    return wandb.api.api_key is not None  # deprecated in versions whose login takes `prompt`


def _settings(wandb: Any) -> Any:
    """Build settings with bounded waits and without console capture. Environment variables take precedence."""
    known = wandb.Settings.model_fields
    settings: dict[str, Any] = {
        name: seconds
        for name, seconds in _DEFAULTS.items()
        if name in known and f"WANDB_{name.upper()}" not in os.environ
    }
    if "WANDB_SILENT" not in os.environ:
        settings["silent"] = True
    if "WANDB_CONSOLE" not in os.environ:
        settings["console"] = "off"
    return wandb.Settings(**settings)


def _arguments(chosen: WandbConfig, directory: RunDirectory) -> dict[str, Any]:
    """Build the arguments that identify the run. WANDB_* variables override the config."""
    variables = os.environ
    labels = {
        "project": variables.get("WANDB_PROJECT", chosen.project),
        "entity": variables.get("WANDB_ENTITY", chosen.entity),
        "name": variables.get("WANDB_NAME", chosen.name or directory.path.name),
        "tags": variables["WANDB_TAGS"].split(",") if "WANDB_TAGS" in variables else list(chosen.tags),
    }
    return {
        **tree_without_secrets(labels),
        "dir": variables.get("WANDB_DIR", str(directory.path)),
        "id": variables.get("WANDB_RUN_ID") or _kept_id(directory),
        "resume": variables.get("WANDB_RESUME", "allow"),
        "reinit": "create_new",
    }


def _kept_id(directory: RunDirectory) -> str:
    """Read the directory's wandb run id, or create one if its file is missing.

    Raises:
        TriaxisError: the file holds something other than an id.
    """
    if not directory.wandb_id.exists():
        write_atomically(directory.wandb_id, [secrets.token_hex(4).encode()])
    kept = directory.known_wandb_id() or ""
    if not _ID.fullmatch(kept):
        raise TriaxisError(
            f"{directory.wandb_id} holds {kept!r}, which is not a run's id: at most 64 letters, digits, - and _. Write the id of "
            "the run's page into it, or remove it: the next attempt then begins a new page."
        )
    return kept
