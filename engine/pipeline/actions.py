"""Defines a pipeline schedule and its actions.

    1F1B, pp 2, 3 microbatches

        rank 0: 0F0 0F1 0B0 0F2 0B1 0B2       0F1 = chunk 0, forward, microbatch 1
        rank 1: 0F0 0B0 0F1 0B1 0F2 0B2       chunk = index of a stage on its rank, 0 .. vpp - 1

A schedule holds compute only; `triaxis.engine.pipeline.lowering` derives its sends and receives.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from triaxis.engine.config.values.schedule_file import ACTION, not_an_action
from triaxis.engine.errors import ScheduleError
from triaxis.engine.layout.placement import Placement

__all__ = ["Action", "Kind", "Output", "Placement", "Schedule"]


class Kind(StrEnum):
    """A kind of work on a microbatch: F forward, B backward. I (input gradient) and W (weight gradients) together equal B."""

    F = "F"
    """Forward."""
    B = "B"
    """Backward: input gradient and weight gradients."""
    I = "I"  # noqa: E741
    """Input gradient only; a later `W` computes the weight gradients."""
    W = "W"
    """The deferred weight gradients."""

    @property
    def words(self) -> str:
        """The kind in words, such as "input gradient"."""
        return {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}[self]


class Output(NamedTuple):
    """A result that another stage reads. An activation has kind F. An input gradient has kind B, even if an `I` computed it."""

    stage: int
    kind: Kind
    microbatch: int


class Action(NamedTuple):
    """One computation on one rank, written as `<chunk><kind><microbatch>`, for example `0F3`."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read an action from the text that `str` wrote.

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
    """Every pp rank's compute actions, in order.

    Attributes:
        name: name of the algorithm, or the name in the schedule's file.
        actions: one tuple per pp rank.
    """

    name: str
    placement: Placement
    num_microbatches: int
    forward_only: bool
    actions: tuple[tuple[Action, ...], ...]

    def input_of(self, stage: int, action: Action) -> Output | None:
        """Return the other stage's output that `action` on `stage` reads, or None.

        The first stage's forward, the last stage's backward and every `W` read none.
        """
        if action.kind is Kind.F:
            return Output(stage - 1, Kind.F, action.microbatch) if stage > 0 else None
        if action.kind is Kind.W or stage == self.placement.num_stages - 1:
            return None
        return Output(stage + 1, Kind.B, action.microbatch)

    @staticmethod
    def output_of(stage: int, action: Action) -> Output | None:
        """Name the output of `action` on `stage`, even if no other stage reads the output. None for a `W`."""
        if action.kind is Kind.W:
            return None
        return Output(stage, Kind.F if action.kind is Kind.F else Kind.B, action.microbatch)
