"""Bytes of flat buffers and optimizer state on a rank, counted from the configuration alone (no torch here)."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config.groups import is_frozen
from engine.config.optimizer_kinds import OPTIMIZERS
from engine.config.tree import Config
from engine.layout.param_layout import layout_parameters
from engine.layout.partition import StageLayers
from engine.layout.rank_grid import ParallelSizes
from engine.layout.shard_spec import ParamRecord, localize
from models.predict.terms import BYTES_PER_ELEMENT, accumulation_bytes
from models.specs import stage_specs


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of what lives between steps on one rank."""

    parameters: int
    gradients: int
    optimizer: int


def state_bytes(config: Config, sizes: ParallelSizes, chunks: Sequence[StageLayers]) -> StateBytes:
    """Count the flat buffers and the optimizer's state of a rank that holds these stages."""
    element = BYTES_PER_ELEMENT[config.precision.dtype]
    wide = accumulation_bytes(element)
    gradient = element if config.precision.gradients == "bf16" else wide
    layouts = layout_parameters(
        _records(config, sizes, chunks),
        dp=sizes.dp_cp,
        expert_dp=sizes.expert_dp,
        bucket_numel=config.optimizer.bucket_bytes // gradient,
    )
    parameters = gradients = optimizer = 0
    for layout in layouts:
        if layout.key.is_frozen:
            # What never changes is its own master.
            parameters += layout.numel * element
            continue
        if not layout.key.is_trained:
            # A parameter of the accumulation dtype is its own master.
            parameters += layout.numel * wide
            continue
        parameters += layout.numel * element
        gradients += layout.numel * gradient
        owners = sizes.reduce_size(layout.key.reduce_over)
        optimizer += layout.numel // owners * _of_owned(config, element, wide)
    return StateBytes(parameters, gradients, optimizer)


def _of_owned(config: Config, element: int, wide: int) -> int:
    """Count the bytes of one owned parameter: its moments, its master and its average."""
    precision = config.precision
    moment = element if precision.moments == "bf16" else wide
    master = wide - element if precision.masters == "split" else 0 if wide == element else wide
    average = 0 if config.optimizer.ema is None else wide
    return len(OPTIMIZERS[config.optimizer.name].moments) * moment + master + average


def _records(config: Config, sizes: ParallelSizes, mine: Sequence[StageLayers]) -> list[ParamRecord]:
    specs = {spec.name: spec for stage in mine for spec in stage_specs(config.model, stage)}
    sequence_parallel = config.parallel.sequence_parallel
    place = sizes.expert_place(0)
    return [
        localize(
            spec,
            tp=sizes.tp,
            tp_index=0,
            sequence_parallel=sequence_parallel,
            experts=place,
            is_frozen=is_frozen(spec.name, config.optimizer),
        )
        for spec in specs.values()
    ]
