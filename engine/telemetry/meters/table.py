"""The meters of a run: a new number of a step is a file of this room and a row here, or one of an extension."""

from collections.abc import Callable, Sequence

from triaxis.engine.step import Engine
from triaxis.engine.telemetry.meters.expert_load import LoadMeter
from triaxis.engine.telemetry.meters.fp8_shares import Fp8Shares
from triaxis.engine.telemetry.meters.group_norms import GroupNorms
from triaxis.engine.telemetry.meters.result_numbers import LossesAhead, LossScales, Outliers
from triaxis.engine.telemetry.meters.step_meter import StepMeter

METERS: Sequence[Callable[[Engine], StepMeter | None]] = (
    LoadMeter.of,
    LossesAhead.of,
    LossScales.of,
    Outliers.of,
    GroupNorms.of,
    Fp8Shares.of,
)
"""Makers of the meters, in the order of their fields and lines; None: the configuration has no use for it."""


def open_meters(engine: Engine) -> list[StepMeter]:
    """Make the meters of this rank's run; every rank calls it."""
    return [meter for make in (*METERS, *engine.config.model.own.meters) if (meter := make(engine)) is not None]
