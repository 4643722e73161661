"""Reports checkpoints and trouble as events, and as lines on rank 0. Every rank calls the notices.

They implement the notice protocols in `triaxis.engine.checkpoint.saving` and `triaxis.engine.resilience.guard`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.checkpoint.format.fingerprint import describe
from triaxis.engine.checkpoint.format.manifest import Kind
from triaxis.engine.checkpoint.resume import ResumePoint
from triaxis.engine.comm.stop import Stop
from triaxis.engine.config.quantities.run_phases import reading_fields
from triaxis.engine.config.tree import Config
from triaxis.engine.run.directory import RunDirectory
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.engine.telemetry.outlets.hub import Telemetry
from triaxis.engine.telemetry.record.events import EventKind


@dataclass(eq=False)
class CheckpointNotices:
    """Reports saves, and records the first save in the run's `directory`.

    Attributes:
        stall_seconds: time for which the start of the newest save stopped training.
        waited_seconds: time for which training waited for the previous save before the newest save.
    """

    telemetry: Telemetry
    directory: RunDirectory
    stall_seconds: float = 0.0
    waited_seconds: float = 0.0

    def on_save_started(self, step: int, stall_seconds: float, waited_seconds: float) -> None:
        self.stall_seconds, self.waited_seconds = stall_seconds, waited_seconds

    def on_saved(self, step: int, folder: Path, num_bytes: int, seconds: float) -> None:
        self.telemetry.event(
            "checkpoint_saved",
            step=step,
            folder=str(folder),
            bytes=num_bytes,
            seconds=seconds,
            stall_seconds=self.stall_seconds,
            waited_seconds=self.waited_seconds,
        )
        if self.telemetry.report is None:
            return
        try:
            self.directory.mark_saved(folder, step)
        except OSError as error:
            # The checkpoint itself is complete; the next save tries to note it again.
            self.telemetry.say(f"{self.directory.path} cannot record that the run has saved: {error}", "yellow")
        waited = self.stall_seconds + self.waited_seconds
        self.telemetry.say(
            f"saved step {step:,}: {gigabytes(num_bytes)} in {seconds:.1f} s, training waited {waited:.2f} s ({folder})"
        )

    def on_save_failed(self, step: int, reason: str) -> None:
        self.telemetry.event("checkpoint_failed", step=step, reason=reason)
        self.telemetry.say(
            f"the checkpoint of step {step:,} was NOT saved: {reason}. Older ones are untouched; training goes on and saves "
            "again at the next interval.",
            "red",
        )

    def on_retired(self, names: list[str]) -> None:
        self.telemetry.event("checkpoints_retired", names=names)

    def on_fingerprint(self, step: int, fingerprint: dict[Kind, str]) -> None:
        self.telemetry.event("fingerprint", step=step, **fingerprint)
        self.telemetry.say(f"fingerprint at step {step:,}: {describe(fingerprint)}")


@dataclass(frozen=True, slots=True)
class TroubleNotices:
    """Reports trouble, such as a loss that is not finite."""

    telemetry: Telemetry

    def on_trouble(self, kind: EventKind, step: int, message: str, **details: Any) -> None:
        """Report trouble in step `step`, counted from 0. The event counts steps from 1."""
        self.telemetry.notice(kind, message, step=step + 1, **details)


def say_beginning(telemetry: Telemetry, directory: RunDirectory, beginning: ResumePoint, config: Config) -> None:
    """Report where the run begins, changed settings, and newer checkpoints that are unusable.

    The event holds every setting that decides which samples a step reads.
    """
    if directory.swept:
        telemetry.event("checkpoints_swept", names=list(directory.swept))
    telemetry.event(
        "begun",
        step=beginning.state.step,
        source=None if beginning.source is None else str(beginning.source),
        loaded=beginning.loaded if beginning.source is not None else None,
        consumed_samples=beginning.state.consumed_samples,
        reads=reading_fields(config),
        skipped=[list(pair) for pair in beginning.history.skipped.ranges],
        differences=list(beginning.differences),
        passed_over=list(beginning.passed_over),
        set_aside=None if directory.set_aside is None else str(directory.set_aside),
    )
    for problem in beginning.passed_over:
        telemetry.say(f"a newer checkpoint cannot be used. {problem}", "yellow")
    if directory.set_aside is not None:
        telemetry.say(f"from scratch: earlier checkpoints were moved to {directory.set_aside}")
    if beginning.source is None:
        return
    if beginning.loaded == "weights":
        telemetry.say(f"starting at step 0 with the weights of {beginning.source}, and a fresh optimizer")
    else:
        state = beginning.state
        telemetry.say(
            f"resuming after step {state.step:,} ({state.consumed_tokens:,} tokens) from {beginning.source}", "green"
        )
    if beginning.differences:
        listed = "\n".join(f"    {difference}" for difference in beginning.differences)
        telemetry.say(f"  differs from the saved run, so results will not be bitwise equal:\n{listed}")
    telemetry.say()


def say_stopped(
    telemetry: Telemetry, stop: Stop, step: int, *, saved: Path | None, peak_memory_bytes: Sequence[int] = ()
) -> None:
    """Report that the run stops, or its phase ends, after step `step`, counted from 1.

    Args:
        saved: folder of that step's checkpoint; None if the run saves nothing.
        peak_memory_bytes: each rank's peak memory.
    """
    kind: EventKind = "phase_ended" if stop is Stop.NEXT_PHASE else "stopped"
    telemetry.event(kind, step=step, reason=stop.value, peak_memory_bytes=list(peak_memory_bytes))
    if stop is Stop.NEXT_PHASE:
        telemetry.say(f"the phase ends with step {step:,} and is saved; the next one begins", "green")
        return
    rest = (
        "nothing is saved (checkpoint.interval=never), so the same command starts at step 0 again"
        if saved is None
        else f"saved in {saved}; the same command goes on from there"
    )
    telemetry.say(f"{stop.value}: stopped after step {step:,}; {rest}", "yellow")
