"""Choose a layout for a model and a machine by predicted memory alone.

    tp x pp x ep = 1, 2, ..  ->  legal layouts  ->  those whose fullest rank fits  ->  least recomputation, then least pp and tp

The smallest model-parallel size that fits is chosen, since it communicates least.

    tp              a power of two that divides a node's ranks; with sequence parallelism where legal
    ep              1 for a model without experts; tokens are dispatched by all-to-all if ep > 1
    dp              the number of remaining ranks
    recomputation   what `recompute.granularity=auto` finds for each layout

Predictions assume balanced routing. They do not cover operator workspace, CUDA's context and an allocator's rounding. So the share
MARGIN of the memory stays free.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import floor

from triaxis.engine.config.activations import RecomputeConfig
from triaxis.engine.config.plan import parallel_sizes
from triaxis.engine.config.section import Subject, divisors, with_value
from triaxis.engine.config.tree import RULES, Config, broken_keys, require_legal
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.launch.tuning.machine import GPUS_PER_NODE, Machine, gpus
from triaxis.models.predict.communicators import communicator_bytes
from triaxis.models.predict.rank_memory import GB, Memory, Prediction, predict, resolve_recompute
from triaxis.models.predict.recompute_choice import candidates

MARGIN = 0.1
"""Share of a rank's memory that no prediction may use."""

TOKENS_OF_A_MICROBATCH = 8192
"""Tokens per forward beyond which larger microbatches are not tried: a GEMM with this many rows fills a GPU."""

MOST_BUBBLE = 0.25
"""Microbatches are not made larger if (pp - 1) / microbatches, which measures a pipeline's idle time, would exceed this."""

_WEIGHT = {"none": 0, "selective": 1, "full": 2}
"""Kinds of recomputation, ordered by their cost in time."""


@dataclass(frozen=True, slots=True)
class ChosenLayout:
    """A layout that fits a machine.

    Attributes:
        config: the given config with the layout's `parallel` and batch sizes; `recompute.granularity` is auto.
        sizes: size of every axis.
        recompute: the choice to which `auto` resolves.
        prediction: predicted memory of every rank.
        usable_bytes: usable memory per rank, less MARGIN.
    """

    config: Config
    sizes: ParallelSizes
    recompute: RecomputeConfig
    prediction: Prediction
    usable_bytes: int


def choose_layout(config: Config, machine: Machine, kept: Collection[str] = ()) -> ChosenLayout:
    """Choose the layout for a run on all ranks of a machine.

    Args:
        config: the run; the sizes in `parallel`, and `recompute`, are replaced. Each pipeline's number of microbatches per
            step is rounded to four significant bits, and is at least pp. The microbatch size may be doubled.
        machine: the ranks and their memory.
        kept: batch sizes in `train` that stay as they are: `global_batch_size`, `micro_batch_size`.

    Raises:
        ConfigError: the config breaks a rule even with tp=1 and pp=1, or no layout fits. If none fits, the message names the layout
            that needs least memory.
    """
    alone = _with_layout(config, machine, kept, tp=1, pp=1, sequence_parallel=False)
    require_legal(alone, "the run with tp=1 pp=1", machine.num_ranks, machine.ranks_per_node)
    usable_bytes = floor(machine.memory_bytes * (1 - MARGIN))
    too_large: list[_Least] = []
    for size in _model_sizes(config, machine):
        least = [_Least.of(trial, machine) for trial in legal_layouts(config, machine, size, kept)]
        found = [one for each in least if (one := _fit(each, machine, usable_bytes)) is not None]
        if found:
            best = min(found, key=lambda one: (_WEIGHT[one.recompute.granularity], one.sizes.pp, one.sizes.tp))
            return best if "micro_batch_size" in kept else _with_larger_microbatches(best, machine)
        too_large += least
    raise _nothing_fits(config, machine, kept, min(too_large, key=lambda each: each.held.total), usable_bytes)


def stage_without_recomputation(chosen: ChosenLayout, machine: Machine) -> tuple[int, Memory] | None:
    """Find the lowest ZeRO stage above 1 in which data parallelism alone fits without recomputation.

    Returns:
        The stage and the fullest rank's memory. None: no stage fits, or the chosen layout already has no tp, pp or recomputation.
        Also None for a model with experts, because ZeRO would gather all experts though a token uses few.
    """
    sizes, config = chosen.sizes, chosen.config
    if config.model.has_experts or (sizes.tp * sizes.pp == 1 and not chosen.recompute.is_any):
        return None
    config = with_value(config, "train.micro_batch_size", 1)
    alone = _with_layout(config, machine, (), tp=1, pp=1, sequence_parallel=False)
    for zero in (2, 3):
        trial = with_value(alone, "parallel.zero", zero)
        if broken_keys(Subject(trial, machine.num_ranks, machine.ranks_per_node), RULES):
            continue
        held = predict(trial, parallel_sizes(trial), nccl=machine.is_gpu).fullest
        if held.total <= chosen.usable_bytes:
            return zero, held
    return None


def legal_layouts(config: Config, machine: Machine, size: int, kept: Collection[str] = ()) -> Iterator[Config]:
    """Yield the run in every legal layout with tp x pp x ep = `size`. The other arguments are those of `choose_layout`.

    With tp > 1, a layout has sequence parallelism unless only plain tp is legal.
    """
    for tp, pp, ep in _model_cuts(config, machine):
        if tp * pp * ep != size:
            continue
        for sequence_parallel in (True, False) if tp > 1 else (False,):
            trial = _with_layout(config, machine, kept, tp=tp, pp=pp, ep=ep, sequence_parallel=sequence_parallel)
            if not broken_keys(Subject(trial, machine.num_ranks, machine.ranks_per_node), RULES):
                yield trial
                break


def _model_cuts(config: Config, machine: Machine) -> list[tuple[int, int, int]]:
    """List each (tp, pp, ep) that divides the machine's ranks and the model's experts evenly."""
    moe, num_ranks = config.model.moe, machine.num_ranks
    eps = [1] if moe is None else [ep for ep in divisors(num_ranks, 1) if moe.num_experts % ep == 0]
    tps = [2**power for power in range(machine.ranks_per_node.bit_length())]
    return [
        (tp, pp, ep)
        for tp in tps
        if machine.ranks_per_node % tp == 0
        for pp in divisors(num_ranks, 1)
        if num_ranks % (tp * pp) == 0
        for ep in eps
        if num_ranks // pp % ep == 0
    ]


def _model_sizes(config: Config, machine: Machine) -> list[int]:
    """List tp x pp x ep, smallest first, of layouts that divide ranks and experts evenly.

    Some layouts may not be legal.
    """
    return sorted({tp * pp * ep for tp, pp, ep in _model_cuts(config, machine)})


def _with_layout(
    config: Config, machine: Machine, kept: Collection[str], *, tp: int, pp: int, sequence_parallel: bool, ep: int = 1
) -> Config:
    """Build the run's configuration in a layout, without recomputation. The global batch is rounded as in `choose_layout`."""
    dp = machine.num_ranks // (tp * pp)
    batch, each = config.train.global_batch_size, config.train.micro_batch_size * dp
    if "global_batch_size" not in kept:
        batch = max(pp, four_digits(batch / each)) * each
    layout: dict[str, object] = {"tp": tp, "pp": pp, "vpp": 1, "dp": dp, "ep": ep, "etp": 1}
    layout |= {"sequence_parallel": sequence_parallel, "layers_per_stage": None}
    dispatch = "all_to_all" if ep > 1 else "auto"
    precision, fp8 = config.precision, config.precision.fp8
    if fp8 is not None and not sequence_parallel:
        precision = precision.model_copy(update={"fp8": fp8.model_copy(update={"gather": "bf16"})})
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=layout),
            "kernels": config.kernels.model_copy(update={"dispatch": dispatch}),
            "precision": precision,
            "recompute": RecomputeConfig(),
            "train": config.train.model_copy(update={"global_batch_size": batch}),
            "runtime": config.runtime.model_copy(update={"ranks_per_node": machine.ranks_per_node}),
        }
    )


def four_digits(number: float) -> int:
    """Round to an integer with four significant bits, so that large results divide by powers of two."""
    unit = 2 ** max(0, int(number).bit_length() - 4)
    return round(number / unit) * unit


@dataclass(frozen=True, slots=True)
class _Least:
    """A legal layout, and the memory `held` by its fullest rank with as much recomputation as is legal."""

    trial: Config
    sizes: ParallelSizes
    held: Memory

    @classmethod
    def of(cls, trial: Config, machine: Machine) -> "_Least":
        sizes = parallel_sizes(trial)
        *_, most = candidates(trial, sizes)
        recomputed = trial.model_copy(update={"recompute": most})
        return cls(trial, sizes, predict(recomputed, sizes, nccl=machine.is_gpu).fullest)


def _fit(least: _Least, machine: Machine, usable_bytes: int) -> ChosenLayout | None:
    """Find the least recomputation with which the layout fits in `usable_bytes`. None: the layout does not fit with any."""
    sizes, is_gpu = least.sizes, machine.is_gpu
    if least.held.total > usable_bytes:
        return None
    model = least.trial.model
    connections = max(communicator_bytes(sizes, model.kv_heads, has_experts=model.has_experts)) if is_gpu else 0
    # Whole megabytes for readability; rounded down, so that the communicators fit too.
    memory_gb = floor((usable_bytes - connections) / 10**6) / 1000
    if memory_gb <= 0:
        return None
    config = least.trial.model_copy(update={"recompute": RecomputeConfig(granularity="auto", memory_gb=memory_gb)})
    try:
        resolved = resolve_recompute(config, sizes)
    except ConfigError:
        return None
    return ChosenLayout(config, sizes, resolved.recompute, predict(resolved, sizes, nccl=is_gpu), usable_bytes)


def _with_larger_microbatches(chosen: ChosenLayout, machine: Machine) -> ChosenLayout:
    """Double the microbatch size as often as the layout still fits with the same recomputation.

    Doubling stops at `TOKENS_OF_A_MICROBATCH`, at an idle share above `MOST_BUBBLE`, or if a dp rank's batch would not be whole
    microbatches.
    """
    train, sizes = chosen.config.train, chosen.sizes
    size = train.micro_batch_size * 2
    num_microbatches, rest = divmod(train.global_batch_size, size * sizes.dp)
    if rest or size * chosen.config.model.seq_length > TOKENS_OF_A_MICROBATCH:
        return chosen
    if sizes.pp - 1 > MOST_BUBBLE * num_microbatches:
        return chosen
    larger_train = train.model_copy(update={"micro_batch_size": size})
    trial = chosen.config.model_copy(update={"train": larger_train, "recompute": RecomputeConfig()})
    larger = _fit(_Least.of(trial, machine), machine, chosen.usable_bytes)
    if larger is None or larger.recompute != chosen.recompute:
        return chosen
    return _with_larger_microbatches(larger, machine)


def _nothing_fits(
    config: Config, machine: Machine, kept: Collection[str], least: _Least, usable_bytes: int
) -> ConfigError:
    """Build the error that names the layout needing least memory, and how much its fullest rank lacks."""
    held = least.held
    state = held.parameters + held.gradients + held.optimizer
    ways = ["a machine with more memory", "GPUs (--gpus 8x80GB)"]
    if machine.is_gpu:
        enough = _enough_gpus(config, machine, kept, usable_bytes)
        given = f"{machine.memory_bytes / GB:g}GB"
        ways = ["GPUs with more memory"] + ([] if enough is None else [f"more of them (--gpus {enough}x{given})"])
    ways += ["a shorter sequence (--seq-length)"] if state < usable_bytes else []
    return ConfigError(
        [
            f"memory = {gigabytes(held.total)} on the fullest {machine.rank} of the nearest layout, {least.sizes}, with "
            f"everything recomputed: must be at most {gigabytes(usable_bytes)}, {1 - MARGIN:.0%} of what it has, or a rank would "
            f"run out of memory. It lacks {gigabytes(held.total - usable_bytes)}; parameters, gradients and optimizer "
            f"state alone take {gigabytes(state)}. Use {', '.join(ways)} or a smaller model."
        ],
        f"the layout for {machine.name}",
    )


def _enough_gpus(config: Config, machine: Machine, kept: Collection[str], usable_bytes: int) -> int | None:
    """Double the machine's GPUs until some layout fits, and return their number. None: 128 times as many GPUs are too few."""
    for count in (machine.num_ranks * 2**doublings for doublings in range(1, 8)):
        if count > GPUS_PER_NODE and count % GPUS_PER_NODE:
            continue
        larger = gpus(count, machine.memory_bytes)
        # From the largest model-parallel size down: the largest holds least.
        for size in reversed(_model_sizes(config, larger)):
            trials = legal_layouts(config, larger, size, kept)
            if any(_Least.of(trial, larger).held.total <= usable_bytes for trial in trials):
                return count
    return None
