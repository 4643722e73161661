"""What a rank's memory will hold, from the configuration alone, and what would make it hold less (no torch here).

    parameters     flat buffers, the run's dtype
    gradients      flat buffers, accumulation dtype (or as narrow as the parameters)
    optimizer      moments, and masters where the parameters are not wide enough; 1/dp of each bucket
    activations    what microbatches in flight keep for their backwards (`models/activations.py`), the most at one time
    host           what they keep in the host's memory; no part of the rest

Not in it: what an operator needs while it runs, messages under way, an allocator's rounding. Parameters, gradients and optimizer
are exact, activations as exact as the formula.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.config import Config, RecomputeConfig, batch_plan, parallel_sizes
from engine.config_problems import with_value
from engine.config_rules import problems
from engine.errors import ConfigError
from engine.optimizer.param_layout import layout_parameters
from engine.pipeline import schedules
from engine.pipeline.actions import Action, Kind, Schedule
from engine.pipeline.partition import StageLayers, partition
from engine.rank_grid import ParallelSizes
from engine.shard_spec import ParamRecord, localize
from models.activations import (
    BYTES_PER_ELEMENT,
    accumulation_bytes,
    backward_bytes,
    forward_bytes,
    kept_bytes,
    moved_bytes,
)
from models.recompute import ATTENTION, MLP, candidates, choice_for_layers, worthwhile_parts
from models.specs import stage_specs

GB = 10**9

HEAD_TOKENS = 1024
"""Tokens whose logits are worth having at a time: enough for the head's GEMMs, and few beside a long sequence's."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank by kind; `total` is of its device."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    host: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def predicted_memory(config: Config, sizes: ParallelSizes, pp: int) -> Memory:
    """The memory of the ranks with pipeline index `pp`; tp and dp indices make no difference.

    Raises:
        ConfigError: as `settled`.
    """
    config = settled(config, sizes)
    return _Rank.of(config, sizes, _schedule(config, sizes), pp).memory(config)


def settled(config: Config, sizes: ParallelSizes) -> Config:
    """Replace each `auto` of `recompute` by what it comes to: the same on every rank.

    The granularity is the first of `models.recompute.candidates` with which no pipeline rank is predicted to hold more than
    `memory_gb`. Gathered inputs are kept where that many bytes hold them as well; without `memory_gb` they are
    gathered again.

    Raises:
        ConfigError: no choice is enough; the message has the predictions.
    """
    asked = config.recompute
    if "auto" not in (asked.granularity, asked.gathered_inputs):
        return config
    gathered = "regather" if asked.gathered_inputs == "auto" else asked.gathered_inputs
    config = config.model_copy(
        update={"recompute": asked.model_copy(update={"gathered_inputs": gathered, "memory_gb": None})}
    )
    budget_gb = asked.memory_gb
    if budget_gb is None:
        assert asked.granularity != "auto", "a rule asks for it"
        return config
    schedule = _schedule(config, sizes)
    ranks = [_Rank.of(config, sizes, schedule, pp) for pp in range(sizes.pp)]
    lines = []
    for choice in candidates(config, sizes) if asked.granularity == "auto" else [config.recompute]:
        changed = config.model_copy(update={"recompute": choice})
        totals = [rank.memory(changed).total for rank in ranks]
        if max(totals) <= budget_gb * GB:
            return _with_inputs_kept(changed, ranks, budget_gb) if asked.gathered_inputs == "auto" else changed
        worst = totals.index(max(totals))
        lines.append(f"{max(totals) / GB:,.4g} GB with {choice}" + (f" (pp {worst})" if sizes.pp > 1 else ""))
    whatever = ", whatever is recomputed" if asked.granularity == "auto" else ""
    shown = lines if len(lines) <= 4 else [lines[0], lines[-2], lines[-1]]
    state = max(totals) - max(rank.memory(changed).activations for rank in ranks)
    raise ConfigError(
        [
            f"recompute.memory_gb = {budget_gb:g}: a rank is predicted to hold more{whatever}: {'; '.join(shown)}. "
            f"It would run out of memory. Of the last, about {state / GB:,.4g} GB are parameters, gradients and optimizer state: "
            "those take more ranks (parallel.tp, parallel.pp, parallel.dp) or precision.masters=split; activations take less with "
            "offload.num_layers, a smaller train.micro_batch_size or parallel.sequence_parallel=true."
        ]
    )


def _with_inputs_kept(config: Config, ranks: Sequence["_Rank"], budget_gb: float) -> Config:
    """Keep gathered inputs if there are any and the budget holds them; not where norms, whose outputs they are, are made again."""
    if not config.parallel.cuts_sequence or "norm" in config.recompute.parts:
        return config
    recompute = config.recompute.model_copy(update={"gathered_inputs": "keep"})
    kept = config.model_copy(update={"recompute": recompute})
    return kept if max(rank.memory(kept).total for rank in ranks) <= budget_gb * GB else config


def _schedule(config: Config, sizes: ParallelSizes) -> Schedule:
    name = schedules.resolve(config.schedule.name, sizes.vpp)
    return schedules.build(name, sizes.pp, sizes.vpp, batch_plan(config, sizes.dp).num_microbatches)


@dataclass(frozen=True, slots=True)
class _Rank:
    """What does not depend on what is recomputed: the stages of a pipeline rank, its actions, its state (its bytes by kind)."""

    sizes: ParallelSizes
    mine: Sequence[StageLayers]
    row: Sequence[Action]
    parameters: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, config: Config, sizes: ParallelSizes, schedule: Schedule, pp: int) -> "_Rank":
        stages = partition(config.model.num_layers, sizes.pp, sizes.vpp, config.parallel.layers_per_stage)
        mine = [stages[schedule.placement.stage_of(pp, chunk)] for chunk in range(sizes.vpp)]
        element = BYTES_PER_ELEMENT[config.precision.dtype]
        wide = accumulation_bytes(element)
        gradient = element if config.precision.gradients == "bf16" else wide
        layouts = layout_parameters(
            _records(config, sizes, mine), dp=sizes.dp, bucket_numel=config.optimizer.bucket_bytes // gradient
        )
        numel = sum(layout.numel for layout in layouts)
        return cls(
            sizes=sizes,
            mine=mine,
            row=schedule.actions[pp],
            parameters=numel * element,
            gradients=numel * gradient,
            optimizer=numel // sizes.dp * _state_bytes(config, element, wide),
        )

    def memory(self, config: Config) -> Memory:
        """With what `config` recomputes and offloads."""
        activations, host = _most_activations(config, self.sizes, self.mine, self.row)
        return Memory(self.parameters, self.gradients, self.optimizer, activations, host)


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
) -> tuple[int, int]:
    """The most that microbatches keep at one time on the rank whose chunks are `mine`, over its actions: (device, host)."""
    kept = [kept_bytes(config, sizes, stage) for stage in mine]
    moved = [moved_bytes(config, sizes, stage) for stage in mine]
    in_forward = [forward_bytes(config, sizes, stage) for stage in mine]
    in_backward = [backward_bytes(config, sizes, stage) for stage in mine]
    live = most = host = most_host = 0
    for action in row:
        if action.kind is Kind.F:
            most = max(most, live + in_forward[action.chunk])
            live += kept[action.chunk]
            host += moved[action.chunk]
            most_host = max(most_host, host)
        elif action.kind is not Kind.W:
            live -= kept[action.chunk]
            most = max(most, live + in_backward[action.chunk])
            host -= moved[action.chunk]
    return most, most_host


@dataclass(frozen=True, slots=True)
class Saving:
    """One change of a field (or of `recompute` as a whole), and the predicted total after it."""

    key: str
    value: object
    total: int

    def __str__(self) -> str:
        """As it is typed on a command line."""
        if isinstance(self.value, RecomputeConfig):
            modules = "null" if self.value.modules is None else f"[{', '.join(self.value.modules)}]"
            head = "" if self.value.head_tokens is None else f", head_tokens: {self.value.head_tokens}"
            kept = self.value.gathered_inputs
            gathered = "" if kept == "auto" else f", gathered_inputs: {kept}"
            return f"'{self.key}={{granularity: {self.value.granularity}, modules: {modules}{head}{gathered}}}'"
        return f"{self.key}={str(self.value).lower()}"


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
    recompute = config.recompute
    if config.kernels.attention == "explicit":
        yield "kernels.attention", "sdpa"
    if config.parallel.cuts_sequence and settled(config, sizes).recompute.gathered_inputs == "keep":
        yield "recompute.gathered_inputs", "regather"
    yield "precision.masters", "split"
    if recompute.granularity in ("none", "selective"):
        parts = worthwhile_parts(config, sizes)
        elementwise = [part for part in parts if part not in (ATTENTION, MLP)]
        for chosen in (elementwise, parts):
            # A part that is recomputed already stays so.
            modules = sorted(recompute.parts | set(chosen))
            if set(modules) != recompute.parts and (chosen is elementwise or len(chosen) > len(elementwise)):
                yield "recompute", choice_for_layers(recompute, granularity="selective", modules=modules)
    if sizes.tp > 1 and not config.parallel.sequence_parallel:
        yield "parallel.sequence_parallel", True
    if recompute.head_tokens is None:
        yield "recompute.head_tokens", HEAD_TOKENS
    yield from _more_offloaded(config, sizes)
    if config.train.micro_batch_size > 1:
        yield "train.micro_batch_size", config.train.micro_batch_size // 2
    if recompute.granularity in ("none", "selective"):
        yield "recompute", choice_for_layers(recompute, granularity="full")
    yield "parallel.tp", sizes.tp * 2
    yield "parallel.pp", sizes.pp * 2


def _more_offloaded(config: Config, sizes: ParallelSizes) -> Iterator[tuple[str, object]]:
    """Half of a chunk's layers, then all but the last, whose copies nothing would hide."""
    stages = partition(config.model.num_layers, sizes.pp, sizes.vpp, config.parallel.layers_per_stage)
    most = max(len(stage.layers) for stage in stages)
    for num_layers in sorted({most // 2, most - 1}):
        if num_layers > config.offload.num_layers:
            yield "offload.num_layers", num_layers
