"""A run's quantities that follow from its configuration: batches, steps, parallel sizes and stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from triaxis.engine.config.quantities.run_phases import RunPhase, current_phase, run_phases
from triaxis.engine.config.quantities.stage_work import head_forward_flops, layers_forward_flops
from triaxis.engine.config.schema.layout import ParallelConfig
from triaxis.engine.config.schema.training import TrainConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError, counted
from triaxis.engine.layout.balance import balance, even_counts, largest_work
from triaxis.engine.layout.partition import StageLayers, partition
from triaxis.engine.layout.placement import Placement
from triaxis.engine.layout.rank_grid import ParallelSizes, RankGrid


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batch arithmetic for one phase in a run.

    Attributes:
        global_batch_size: samples per optimizer step, over all ranks; the same number as `samples_per_step`.
        micro_batch_size: samples per forward in one pipeline.
        dp: data-parallel size.
        num_microbatches: microbatches per pipeline and step: global_batch_size / (micro_batch_size x dp).
        samples_per_step: amount by which `consumed_samples` grows in a step.
        tokens_per_step: labels in a step, masked ones included.
        num_steps: optimizer steps in the whole run.
        num_tokens: tokens in the whole run.
        phase: the phase's place in the run; if the run has no phases, one phase that is the whole run.
    """

    global_batch_size: int
    micro_batch_size: int
    dp: int
    num_microbatches: int
    samples_per_step: int
    tokens_per_step: int
    num_steps: int
    num_tokens: int
    phase: RunPhase

    def __str__(self) -> str:
        microbatches = counted(self.num_microbatches, "microbatch", "microbatches")
        return (
            f"{counted(self.global_batch_size, 'sample')} per step = {microbatches} of "
            f"{self.micro_batch_size:,} x dp {self.dp:,}; {self.tokens_per_step:,} tokens per step x {self._steps}"
        )

    @property
    def _steps(self) -> str:
        phase = self.phase
        num_steps = phase.end_step - phase.first_step
        steps = f"{counted(num_steps, 'step')} = {num_steps * self.tokens_per_step:,} tokens"
        return f"{steps} of the phase {phase.name}" if phase.name else steps


def partial_batch(train: TrainConfig, dp: int | None) -> str | None:
    """Describe the broken rule if a global batch is not a whole number of microbatches on every pipeline; None if it is."""
    per_round = train.micro_batch_size * (dp or 1)
    if train.global_batch_size % per_round == 0:
        return None
    product = f"micro_batch_size = {train.micro_batch_size}"
    if dp is not None:
        product = f"micro_batch_size x dp = {train.micro_batch_size} x {dp} = {per_round}"
    return f"must be a multiple of {product}: some pipelines would get fewer samples, or samples would be dropped"


def batch_plan(config: Config, dp: int) -> BatchPlan:
    """Compute the batch arithmetic at data-parallel size `dp`.

    Raises:
        ConfigError: the global batch is not a whole number of microbatches on every pipeline. Rules have checked this for the
            config's own dp, but `dp` may be another.
    """
    train, phases = config.train, run_phases(config)
    assert phases, "a checked config has one length"
    if rule := partial_batch(train, dp):
        raise ConfigError([f"train.global_batch_size = {train.global_batch_size}: {rule}."])
    return BatchPlan(
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        dp=dp,
        num_microbatches=train.global_batch_size // (train.micro_batch_size * dp),
        samples_per_step=train.global_batch_size,
        tokens_per_step=train.global_batch_size * config.model.seq_length,
        num_steps=phases[-1].end_step,
        num_tokens=phases[-1].end_token,
        phase=current_phase(config),
    )


def planned_steps(config: Config) -> int | None:
    """Number of optimizer steps in the run; None unless exactly one of steps, tokens and phases gives its length."""
    phases = run_phases(config)
    return phases[-1].end_step if phases else None


def planned_tokens(config: Config) -> int | None:
    """Number of tokens in the run, rounded up to whole steps; None if the config gives no length for the run, or more than one."""
    phases = run_phases(config)
    return phases[-1].end_token if phases else None


def data_parallel_size(parallel: ParallelConfig, world_size: int | None) -> int | None:
    """Compute the data-parallel size that fills `world_size` ranks exactly; None if there is none.

    If `world_size` is None, return the config's value (None if it is open).
    """
    if world_size is None:
        return parallel.dp
    dp, rest = divmod(world_size, parallel.tp * parallel.pp * parallel.cp)
    if rest or dp == 0 or parallel.dp not in (None, dp):
        return None
    return dp


def product_of_sizes(parallel: ParallelConfig, dp: int | None) -> str:
    """Format the sizes whose product is the rank count: "tp x pp x dp = 2 x 4 x 8"; cp appears if it is above 1."""
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "dp": dp}
    given = {name: size for name, size in sizes.items() if size is not None and not (name == "cp" and size == 1)}
    return f"{' x '.join(given)} = {' x '.join(map(str, given.values()))}"


def unfilled_world(parallel: ParallelConfig, world_size: int) -> tuple[str, str]:
    """Describe why no data-parallel size fills `world_size` ranks: (product of the sizes, broken rule)."""
    product = product_of_sizes(parallel, parallel.dp)
    rule = f"must divide the world size {world_size}"
    if parallel.dp is not None:
        rule = f"is {parallel.tp * parallel.pp * parallel.cp * parallel.dp} and must be the world size {world_size}"
    return product, f"{rule}: ranks would be left over, or missing from their groups"


def parallel_sizes(config: Config, world_size: int | None = None) -> ParallelSizes:
    """Compute every axis's size; `world_size` is needed if the config leaves `parallel.dp` open.

    Raises:
        ConfigError: no data-parallel size fills the world, or its size is unknown.
    """
    parallel = config.parallel
    dp = data_parallel_size(parallel, world_size)
    if dp is None:
        if world_size is None:
            raise ConfigError(["parallel.dp is open: the number of ranks is unknown. Give one of both."])
        product, rule = unfilled_world(parallel, world_size)
        raise ConfigError([f"parallel = {product}: {rule}."])
    return ParallelSizes(
        tp=parallel.tp,
        pp=parallel.pp,
        dp=dp,
        dp_replicas=parallel.dp_replicas,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        vpp=parallel.vpp,
        is_v=config.schedule.is_v,
    )


def rank_grid(config: Config, sizes: ParallelSizes, ranks_per_node: int | None = None) -> RankGrid:
    """Build a run's rank grid; `ranks_per_node` is used if `runtime.ranks_per_node` is null."""
    per_node = config.runtime.ranks_per_node or ranks_per_node
    return RankGrid(sizes, per_node, allow_tp_across_nodes=config.parallel.allow_tp_across_nodes)


def stages_of(config: Config, memo: dict[object, Any] | None = None) -> tuple[StageLayers, ...]:
    """List each pipeline stage's layers, in stage order; `memo` caches results for one model under several layouts."""
    memo = {} if memo is None else memo
    model, parallel = config.model, config.parallel
    given = parallel.layers_per_stage
    key = (
        "stages",
        parallel.pp,
        parallel.vpp,
        config.schedule.is_v,
        tuple(given) if isinstance(given, list) else given,
    )
    if key not in memo:
        counts = balance(*_work(config, memo), _ranks(config)) if given == "auto" else given
        memo[key] = partition(model.num_layers, parallel.pp, parallel.vpp, counts, model.num_mtp_layers)
    stages: tuple[StageLayers, ...] = memo[key]
    return stages


def balance_line(config: Config) -> str:
    """Compare the busiest rank's work under `parallel.layers_per_stage=auto` with that under even stages, in one line."""
    parallel, ranks = config.parallel, _ranks(config)
    layers, head = _work(config, {})
    mean = (sum(layers) + head) / parallel.pp

    def above_mean(counts: Sequence[int]) -> str:
        return f"{largest_work(layers, head, counts, ranks)[0] / mean - 1:.1%}"

    chosen = above_mean([stage.num_own for stage in stages_of(config)])
    even = above_mean(even_counts(len(layers), len(ranks)))
    return f"chosen by FLOPs: the busiest rank has {chosen} more than the mean, with even stages {even}"


def work_of_cut(
    config: Config, pp: int, vpp: int, counts: Sequence[int], memo: dict[object, Any], *, is_v: bool
) -> tuple[int, int]:
    """Compute forward FLOPs per token: the busiest rank's, and the largest stage's.

    Args:
        counts: number of layers in each stage.
        memo: cache for one model under several layouts.
    """
    placement = Placement(pp, vpp, is_v)
    return largest_work(
        *_work(config, memo), counts, [placement.rank_of(stage) for stage in range(placement.num_stages)]
    )


def _work(config: Config, memo: dict[object, Any]) -> tuple[tuple[int, ...], int]:
    if "work" not in memo:
        memo["work"] = layers_forward_flops(config.model), head_forward_flops(config.model)
    work: tuple[tuple[int, ...], int] = memo["work"]
    return work


def _ranks(config: Config) -> list[int]:
    placement = placement_of(config)
    return [placement.rank_of(stage) for stage in range(placement.num_stages)]


def placement_of(config: Config) -> Placement:
    """Build the map from stages to the pipeline ranks that hold them."""
    parallel = config.parallel
    return Placement(parallel.pp, parallel.vpp, config.schedule.is_v and parallel.vpp == 2)


def part_length(config: Config) -> int:
    """Number of tokens per sample that a context-parallel rank holds."""
    return config.model.seq_length // config.parallel.cp


def local_seq_length(config: Config) -> int:
    """Number of tokens per sample that one rank holds outside the tensor-parallel region."""
    parallel = config.parallel
    return part_length(config) // (parallel.tp if parallel.sequence_parallel else 1)


def layers_of_the_largest_chunk(config: Config) -> int:
    """Count the layers of the model chunk that has most."""
    parallel, more = config.parallel, config.model.num_mtp_layers
    num_stages, given = parallel.pp * parallel.vpp, parallel.layers_per_stage
    if given == "auto" and config.model.num_layers >= num_stages:
        return max(len(stage.layers) for stage in stages_of(config))
    *before, last = given if isinstance(given, list) and given else [-(-config.model.num_layers // num_stages)]
    return max(*before, last + more) if before else last + more
