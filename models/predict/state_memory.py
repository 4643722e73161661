"""Bytes of flat buffers and optimizer state on a rank, counted from the configuration alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from triaxis.engine.config.fp8 import BLOCKS, fp8_layers
from triaxis.engine.config.groups import is_frozen
from triaxis.engine.config.optimizer_kinds import EMA, MASTER
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.param_layout import layout_parameters
from triaxis.engine.layout.partition import StageLayers
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.layout.shard_spec import ParamRecord, localize
from triaxis.models.predict.terms import BYTES_PER_ELEMENT, accumulation_bytes
from triaxis.models.specs import stage_specs

_IN_FP8 = (
    *(f"attention.{name}.weight" for name in ("q", "kv", "q_a", "kv_a", "q_b", "proj")),
    *(f"{mlp}.{name}.weight" for mlp in ("mlp", "mlp.shared") for name in ("up", "gate_up", "down")),
)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of what lives between steps on one rank; `copies` of weights in FP8, which each step makes anew."""

    parameters: int
    gradients: int
    optimizer: int
    copies: int = 0


def state_bytes(config: Config, sizes: ParallelSizes, chunks: Sequence[StageLayers]) -> StateBytes:
    """Count the flat buffers and the optimizer's state of a rank that holds these stages."""
    element = BYTES_PER_ELEMENT[config.precision.dtype]
    wide = accumulation_bytes(element)
    gradient = element if config.precision.gradients == "bf16" else wide
    records = _records(config, sizes, chunks)
    layouts = layout_parameters(
        records,
        dp=sizes.dp_cp,
        expert_dp=sizes.expert_dp,
        bucket_numel=config.optimizer.bucket_bytes // gradient,
    )
    parameters = gradients = optimizer = 0
    for layout in layouts:
        if not layout.key.is_trained:
            # A parameter of the accumulation dtype is its own master.
            parameters += layout.numel * wide
            continue
        parameters += layout.numel * element
        gradients += layout.numel * gradient
        if layout.key.is_updated:
            owners = sizes.reduce_size(layout.key.reduce_over)
            optimizer += layout.numel // owners * _of_owned(config, element, wide)
    return StateBytes(parameters, gradients, optimizer, _fp8_copies(config, records))


def _fp8_copies(config: Config, records: Sequence[ParamRecord]) -> int:
    """Count the FP8 copies of weights, of W and of its transpose, with their scales."""
    if config.precision.fp8 is None:
        return 0
    recipe = config.precision.fp8.recipe
    numel = [record.numel for record in records if has_fp8_copies(config, record.name)]
    # One scale for a matrix; or one for a square of numbers, or for a row of them.
    block = BLOCKS.get(recipe, 0)
    of_scale = {"tensorwise": 0, "blockwise": block * block, "mxfp8": block}[recipe]
    scales = [each // of_scale if of_scale else 1 for each in numel]
    return 2 * (sum(numel) + BYTES_PER_ELEMENT["fp32"] * sum(scales))


def has_fp8_copies(config: Config, name: str) -> bool:
    """Return whether a weight is read in FP8: one of a projection of attention, an MLP or shared experts, in an FP8 layer."""
    layer = next((int(part) for part in name.split(".")[1:2] if part.isdigit()), -1)
    return name.endswith(_IN_FP8) and layer in fp8_layers(config)


def _of_owned(config: Config, element: int, wide: int) -> int:
    """Count the bytes of one owned parameter: its moments, its master and its average."""
    precision = config.precision
    moment = element if precision.moments == "bf16" else wide
    master = wide - element if precision.masters == "split" else 0 if wide == element else wide
    moments = len([kind for kind in config.state_kinds if kind not in (MASTER, EMA)])
    average = wide if EMA in config.state_kinds else 0
    return moments * moment + master + average


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
