"""What is said where a run begins and where it stops."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from triaxis.engine.checkpoint.format.manifest import TrainingState
from triaxis.engine.checkpoint.resume import ResumePoint
from triaxis.engine.comm.stop import Stop
from triaxis.engine.config.load import load_config
from triaxis.engine.telemetry.outlets.notices import say_beginning, say_stopped

TINY = Path(__file__).resolve().parents[4] / "configs" / "gpt_tiny.yaml"


class Told:
    """A telemetry that keeps its events and lines."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.lines: list[str] = []

    def event(self, kind: str, **fields: Any) -> None:
        self.kinds.append(kind)

    def say(self, text: str = "", style: str = "") -> None:
        self.lines.append(text)


def test_earlier_checkpoints_that_were_moved_are_named() -> None:
    told = Told()
    directory = SimpleNamespace(swept=[], set_aside=Path("runs/a/checkpoints-1"))
    state = TrainingState(step=0, consumed_samples=0, consumed_tokens=0, num_updates=0, lr=0.0, rng={}, data={})
    say_beginning(told, directory, ResumePoint(state), load_config(TINY, ["data.synthetic=true"]))  # type: ignore[arg-type]
    assert told.kinds == ["begun"]
    assert told.lines == ["from scratch: earlier checkpoints were moved to runs/a/checkpoints-1"]


@pytest.mark.parametrize("stop", Stop)
def test_the_end_of_a_phase_is_no_stop(stop: Stop) -> None:
    told = Told()
    say_stopped(told, stop, 8, saved=Path("step_8"))  # type: ignore[arg-type]
    is_phase = stop is Stop.NEXT_PHASE
    assert told.kinds == ["phase_ended" if is_phase else "stopped"]
    assert told.lines[0].startswith("the phase ends with step 8" if is_phase else f"{stop.value}: stopped after step 8")
