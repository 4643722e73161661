"""The vocabulary of a pipeline schedule: actions, the schedule; `Placement` is from below.

    1F1B, pp 2, 3 microbatches            a row per pp rank, its compute actions in order

        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2       0F1 = chunk 0, forward, microbatch 1
        rank 1: 0F0 0B0 0F1 0B1 0F2 0B2       chunk = this rank's number of a stage, 0 .. vpp - 1

A schedule holds compute only. What is sent and received follows from it (`triaxis.engine.pipeline.lowering`).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from triaxis.engine.config.schedule_file import ACTION, not_an_action
from triaxis.engine.errors import ScheduleError
from triaxis.engine.layout.placement import Placement

__all__ = ["Action", "Kind", "Output", "Placement", "Schedule"]


class Kind(StrEnum):
    """The work of a stage on a microbatch. `B` is `I` and `W` in one."""

    F = "F"
    """Forward."""
    B = "B"
    """Backward: gradient of the input and of the weights."""
    I = "I"  # noqa: E741
    """Gradient of the input only; the weight gradient is deferred to a later `W`."""
    W = "W"
    """The deferred gradient of the weights."""

    @property
    def words(self) -> str:
        """Return the kind in words for people."""
        return {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}[self]


class Output(NamedTuple):
    """The result of an action that another stage takes: an activation (F), or an input gradient (B, also of an `I`)."""

    stage: int
    kind: Kind
    microbatch: int


class Action(NamedTuple):
    """One computation of one rank; its text is `<chunk><kind><microbatch>`, for example `0F3`."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read the action that `str` wrote.

        Raises:
            ScheduleError: the text is no action.
        """
        match = ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(not_an_action(text))
        chunk, kind, microbatch = match.groups()
        return cls(Kind(kind), int(chunk), int(microbatch))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The compute actions of every pp rank, in order.

    Attributes:
        name: of the algorithm that made it.
        actions: one tuple per pp rank.
    """

    name: str
    placement: Placement
    num_microbatches: int
    forward_only: bool
    actions: tuple[tuple[Action, ...], ...]

    def input_of(self, stage: int, action: Action) -> Output | None:
        """Return the output of another stage that `action` on `stage` takes; None: it takes none.

        The last stage starts its backward from its own forward, and a `W` works on what its `I` left on the rank.
        """
        if action.kind is Kind.F:
            return Output(stage - 1, Kind.F, action.microbatch) if stage > 0 else None
        if action.kind is Kind.W or stage == self.placement.num_stages - 1:
            return None
        return Output(stage + 1, Kind.B, action.microbatch)

    @staticmethod
    def output_of(stage: int, action: Action) -> Output | None:
        """Return what `action` on `stage` hands on; None: a `W` hands on nothing."""
        if action.kind is Kind.W:
            return None
        return Output(stage, Kind.F if action.kind is Kind.F else Kind.B, action.microbatch)
