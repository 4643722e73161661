"""What a rank's memory will hold, from the configuration alone, and what would make it hold less (no torch here).

    parameters     flat buffers, the run's dtype
    gradients      flat buffers, accumulation dtype
    optimizer      moments, and masters where the parameters are not wide enough; 1/dp of each bucket
    activations    what microbatches in flight keep for their backwards (`models/activations.py`), the most at one time

Not in it: what an operator needs while it runs, messages under way, an allocator's rounding. Parameters, gradients and optimizer
are exact, activations as exact as the formula.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from engine.config import Config, batch_plan, parallel_sizes
from engine.config_problems import with_value
from engine.config_rules import problems
from engine.optimizer.param_layout import layout_parameters
from engine.pipeline import schedules
from engine.pipeline.actions import Action, Kind
from engine.pipeline.partition import StageLayers, partition
from engine.rank_grid import ParallelSizes
from engine.shard_spec import ParamRecord, localize
from models.activations import BYTES_PER_ELEMENT, accumulation_bytes, backward_bytes, kept_bytes
from models.specs import stage_specs


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank by kind."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def predicted_memory(config: Config, sizes: ParallelSizes, pp: int) -> Memory:
    """The memory of the ranks with pipeline index `pp`; tp and dp indices make no difference."""
    model = config.model
    stages = partition(model.num_layers, sizes.pp, sizes.vpp, config.parallel.layers_per_stage)
    schedule = schedules.build(
        schedules.resolve(config.schedule.name, sizes.vpp),
        sizes.pp,
        sizes.vpp,
        batch_plan(config, sizes.dp).num_microbatches,
    )
    mine = [stages[schedule.placement.stage_of(pp, chunk)] for chunk in range(sizes.vpp)]
    element = BYTES_PER_ELEMENT[config.precision.dtype]
    wide = accumulation_bytes(element)
    layouts = layout_parameters(
        _records(config, sizes, mine), dp=sizes.dp, bucket_numel=config.optimizer.bucket_bytes // wide
    )
    numel = sum(layout.numel for layout in layouts)
    return Memory(
        parameters=numel * element,
        gradients=numel * wide,
        optimizer=numel // sizes.dp * _state_bytes(config, element, wide),
        activations=int(_most_activations(config, sizes, mine, schedule.actions[pp])),
    )


def _state_bytes(config: Config, element: int, wide: int) -> int:
    """Of one owned parameter: two moments and what its master takes beside it."""
    precision = config.precision
    moment = element if precision.moments == "bf16" else wide
    master = wide - element if precision.masters == "split" else 0 if wide == element else wide
    return 2 * moment + master


def _records(config: Config, sizes: ParallelSizes, mine: Sequence[StageLayers]) -> list[ParamRecord]:
    specs = {spec.name: spec for stage in mine for spec in stage_specs(config.model, stage)}
    sequence_parallel = config.parallel.sequence_parallel
    return [localize(spec, tp=sizes.tp, tp_index=0, sequence_parallel=sequence_parallel) for spec in specs.values()]


def _most_activations(
    config: Config, sizes: ParallelSizes, mine: Sequence[StageLayers], row: Sequence[Action]
) -> Fraction:
    """The most that microbatches keep at one time on the rank whose chunks are `mine`, over its actions."""
    kept = [kept_bytes(config, sizes, stage) for stage in mine]
    in_backward = [backward_bytes(config, sizes, stage) for stage in mine]
    live = most = Fraction(0)
    for action in row:
        if action.kind is Kind.F:
            live += kept[action.chunk]
            most = max(most, live)
        elif action.kind is not Kind.W:
            live -= kept[action.chunk]
            most = max(most, live + in_backward[action.chunk])
    return most


@dataclass(frozen=True, slots=True)
class Saving:
    """One change of a field, and the predicted total after it."""

    key: str
    value: object
    total: int


def savings(config: Config, pp: int) -> Iterator[Saving]:
    """Legal changes that make the predicted memory of pipeline rank `pp` smaller, from the cheapest in speed on.

    Those of the layout keep the number of ranks, so dp gets smaller where tp or pp gets larger.
    """
    sizes = parallel_sizes(config)
    now = predicted_memory(config, sizes, pp).total
    for key, value in _candidates(config, sizes):
        changed = with_value(config, key, value)
        if key in ("parallel.tp", "parallel.pp"):
            grown = sizes.tp * sizes.pp * sizes.dp // (changed.parallel.tp * changed.parallel.pp)
            changed = with_value(changed, "parallel.dp", grown)
        if problems(changed, sizes.world_size):
            continue
        total = predicted_memory(changed, parallel_sizes(changed), pp).total
        if total < now:
            yield Saving(key, value, total)


def _candidates(config: Config, sizes: ParallelSizes) -> Iterator[tuple[str, object]]:
    if config.kernels.attention == "explicit":
        yield "kernels.attention", "sdpa"
    yield "precision.masters", "split"
    if config.recompute.granularity == "none":
        yield "recompute.granularity", "selective"
    if sizes.tp > 1 and not config.parallel.sequence_parallel:
        yield "parallel.sequence_parallel", True
    if config.train.micro_batch_size > 1:
        yield "train.micro_batch_size", config.train.micro_batch_size // 2
    if config.recompute.granularity != "full":
        yield "recompute.granularity", "full"
    yield "parallel.tp", sizes.tp * 2
    yield "parallel.pp", sizes.pp * 2
