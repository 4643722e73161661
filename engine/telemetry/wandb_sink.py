"""Weights & Biases: one run over all attempts, never in the way of training (no torch here).

    WANDB_MODE=offline, disabled   that mode
    no key                         offline: nobody is asked for one
    a key                          online; where that fails within its time limit, offline

    train/step  train/loss  train/val_loss ...      every metric is drawn against train/step
    perf/tokens_per_second  perf/mfu  perf/data_seconds ...
    memory/peak_gib

The mode is always said: unset, with a key and without a network, wandb waits for 100 seconds and then fails (0.31). The id
stands in the run directory, so that the next attempt continues the run; offline attempts make new folders with the same id,
and `wandb sync` joins them. wandb's own step counter is not used: it starts at 0 in every attempt.
"""

import inspect
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from engine.config import Config, WandbConfig
from engine.data.files import write_atomically
from engine.telemetry.metrics import StepMetrics
from engine.telemetry.run_dir import RunDirectory
from engine.telemetry.sections import sections

_DEFAULTS: Mapping[str, float] = {"init_timeout": 20.0, "finish_timeout": 60.0}
"""Seconds that we let wandb have, unless WANDB_INIT_TIMEOUT, WANDB_FINISH_TIMEOUT say otherwise. Its own: 90 and for ever."""

_TEARDOWN_SECONDS = 10.0
_CLOSE_SECONDS = 90.0
"""After which wandb's own process is ended, since it was seen to outlive its own limits."""


class WandbSink:
    """The sink behind wandb.

    Args:
        config: of the run; recorded whole.
        directory: where `wandb_id` and `wandb/` stand.
        layout: parallel sizes and what else is worth filtering by; recorded beside the config.

    Attributes:
        mode: online, offline or disabled, as it came out.
        why: for offline and disabled, the reason.
        url: of the run, where it is online.

    Raises:
        Exception: whatever wandb raises when not even offline works.
    """

    name = "wandb"

    def __init__(self, config: Config, directory: RunDirectory, layout: Mapping[str, Any]) -> None:
        assert config.telemetry.wandb is not None, "telemetry.wandb is set"
        import wandb

        arguments = _arguments(config.telemetry.wandb, directory)
        arguments["config"] = {**config.model_dump(mode="json"), "layout": dict(layout)}
        self._run, self.mode, self.why = _start(wandb, _settings(wandb), arguments)
        self.url: str | None = self._run.url if self.mode == "online" else None
        self._run.define_metric("train/step")
        self._run.define_metric("*", step_metric="train/step")

    def record(self, metrics: StepMetrics) -> None:
        """Hands the values to wandb's own process; does not wait for a network."""
        self._run.log(sections(metrics))

    def close(self) -> None:
        with ending_its_process_after(_CLOSE_SECONDS):
            self._run.finish()


def _start(wandb: Any, settings: Any, arguments: dict[str, Any]) -> tuple[Any, str, str]:
    """The run, its mode, and why it is not online."""
    given = os.environ.get("WANDB_MODE") or ("disabled" if os.environ.get("WANDB_DISABLED") == "true" else "online")
    if given != "online":
        return wandb.init(mode=given, settings=settings, **arguments), given, "the environment says so"
    why = "no API key"
    try:
        wandb.setup(settings=settings)
        if _has_key(wandb):
            return wandb.init(mode="online", settings=settings, **arguments), "online", ""
    except Exception as error:
        why = f"online failed: {(str(error) or type(error).__name__).splitlines()[0]}"
        with suppress(Exception), ending_its_process_after(_TEARDOWN_SECONDS):
            wandb.teardown()  # its process may still hold the id, and would refuse a second init
    return wandb.init(mode="offline", settings=settings, **arguments), "offline", why


@contextmanager
def ending_its_process_after(limit_seconds: float) -> Iterator[None]:
    """End wandb's own process if what is inside takes longer: wandb waits for it without a limit, and it may never end."""
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
    """Whether wandb finds a key (environment, netrc), without asking a person. It may verify it, which takes seconds.

    Raises:
        Exception: wandb's own, where it finds a key and cannot use it.
    """
    if "prompt" in inspect.signature(wandb.login).parameters:
        return bool(wandb.login(prompt=False))
    return wandb.api.api_key is not None  # deprecated where login can be told not to prompt


def _settings(wandb: Any) -> Any:
    """Bounded waits; an environment variable counts more. Our console stays ours: wandb does not capture it."""
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
    """What identifies the run: environment before config, as wandb's users expect of WANDB_*."""
    variables = os.environ
    return {
        "project": variables.get("WANDB_PROJECT", chosen.project),
        "entity": variables.get("WANDB_ENTITY", chosen.entity),
        "name": variables.get("WANDB_NAME", chosen.name or directory.path.name),
        "tags": variables["WANDB_TAGS"].split(",") if "WANDB_TAGS" in variables else list(chosen.tags),
        "dir": variables.get("WANDB_DIR", str(directory.path)),
        "id": variables.get("WANDB_RUN_ID") or _kept_id(directory),
        "resume": variables.get("WANDB_RESUME", "allow"),
        "reinit": "create_new",
    }


def _kept_id(directory: RunDirectory) -> str:
    """The id of this run directory's wandb run, made at the first attempt."""
    if not directory.wandb_id.exists():
        write_atomically(directory.wandb_id, [secrets.token_hex(4).encode()])
    return directory.wandb_id.read_text().strip()
