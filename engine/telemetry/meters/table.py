"""Lists the meters. To record a new number per step, add a file and a row here, or use an extension."""

from collections.abc import Callable, Sequence

from triaxis.engine.step import Engine
from triaxis.engine.telemetry.meters.expert_load import LoadMeter
from triaxis.engine.telemetry.meters.group_norms import GroupNorms
from triaxis.engine.telemetry.meters.result_numbers import LossesAhead, LossScales, Outliers
from triaxis.engine.telemetry.meters.step_meter import StepMeter

METERS: Sequence[Callable[[Engine], StepMeter | None]] = (
    LoadMeter.of,
    LossesAhead.of,
    LossScales.of,
    Outliers.of,
    GroupNorms.of,
)
"""Meter factories, in the order of their fields and lines. A factory returns None if the configuration does not need its meter."""


def open_meters(engine: Engine) -> list[StepMeter]:
    """Build this rank's meters, first `METERS`, then the run extension's. Every rank must call this function."""
    return [meter for make in (*METERS, *engine.config.model.own.meters) if (meter := make(engine)) is not None]
