"""Count the bytes of a rank's flat buffers and optimizer state from the configuration alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from triaxis.engine.config.quantities.fp8_layers import fp8_layers
from triaxis.engine.config.quantities.state_plan import (
    ITEMSIZE,
    MAIN_GRAD,
    NUM_PLACES,
    PIECE_NUMEL,
    WEIGHT,
    layout_of,
    state_rows,
)
from triaxis.engine.config.quantities.update_settings import is_frozen
from triaxis.engine.config.schema.fp8 import BLOCKS
from triaxis.engine.config.tree import Config
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.layout.shard_spec import ParamRecord, localize
from triaxis.models.predict.terms import BYTES_PER_ELEMENT
from triaxis.models.specs import StageContents, stage_specs

_IN_FP8 = (
    *(f"attention.{name}.weight" for name in ("q", "kv", "q_a", "kv_a", "q_b", "proj")),
    *(f"{mlp}.{name}.weight" for mlp in ("mlp", "mlp.shared") for name in ("up", "gate_up", "down")),
)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one rank's training state.

    Attributes:
        optimizer: state on the device; with `optimizer.offload: cpu` the places through which it passes.
        copies: FP8 copies of weights, which each step computes again.
        host: state in host memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    copies: int = 0
    host: int = 0


def state_bytes(config: Config, sizes: ParallelSizes, chunks: Sequence[StageContents]) -> StateBytes:
    """Count the bytes of flat buffers and optimizer state on a rank that holds these stages."""
    records = held_records(config, sizes, chunks)
    nbytes = dict.fromkeys((WEIGHT, MAIN_GRAD), 0)
    optimizer = itemsize = 0
    pieces: list[int] = []
    for layout in layout_of(config, sizes, records):
        owners = sizes.owners(layout.key.reduce_over)
        rows = state_rows(layout.key, config.precision, config.state_kinds)
        for kind, row in rows.items():
            if kind in nbytes:
                nbytes[kind] += row.nbytes(layout, owners)
            else:
                optimizer += row.nbytes(layout, owners)
        if layout.key.is_updated:
            itemsize = sum(ITEMSIZE[row.dtype] for kind, row in rows.items() if kind not in nbytes)
            pieces += [
                min(PIECE_NUMEL, numel - start)
                for numel in ((bucket.stop - bucket.start) // owners for bucket in layout.buckets)
                for start in range(0, numel, PIECE_NUMEL)
            ]
    host = 0
    if config.optimizer.offload == "cpu":
        host, optimizer = optimizer, min(NUM_PLACES, len(pieces)) * max(pieces, default=0) * itemsize
    return StateBytes(nbytes[WEIGHT], nbytes[MAIN_GRAD], optimizer, _fp8_copies(config, records), host)


def _fp8_copies(config: Config, records: Sequence[ParamRecord]) -> int:
    """Count the bytes of the weights' FP8 copies: each weight W and its transpose, with their scales."""
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
    """Whether the named weight has FP8 copies: in an FP8 layer, a projection in attention, an MLP or the shared experts."""
    layer = next((int(part) for part in name.split(".")[1:2] if part.isdigit()), -1)
    return name.endswith(_IN_FP8) and layer in fp8_layers(config)


def held_records(
    config: Config, sizes: ParallelSizes, mine: Sequence[StageContents], tp_index: int = 0
) -> list[ParamRecord]:
    """List, in forward order, the parameters on a rank that holds the stages `mine`; all ranks' experts have equal shapes."""
    specs = {spec.name: spec for stage in mine for spec in stage_specs(config.model, stage)}
    return [
        localize(
            spec,
            tp=sizes.tp,
            tp_index=tp_index,
            sequence_parallel=config.parallel.sequence_parallel,
            experts=sizes.expert_place(0),
            is_frozen=is_frozen(spec.name, config.optimizer),
        )
        for spec in specs.values()
    ]
