"""Choose a layout for a model and a machine by predicted memory alone.

    tp x pp x ep = 1, 2, ..  ->  legal layouts  ->  those whose fullest rank fits  ->  least recomputation, then least pp and tp

The smallest model-parallel size that fits is chosen, since it communicates least.

    tp              a divisor of a node's ranks; with sequence parallelism where legal
    ep              1 for a model without experts; tokens are dispatched by all-to-all if ep > 1
    dp              the number of remaining ranks
    recomputation   what `recompute.granularity=auto` finds for each layout

Predictions assume balanced routing. They do not cover operator workspace, CUDA's context and an allocator's rounding. So the share
MARGIN of the memory stays free.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import floor

from triaxis.engine.config.quantities.plan import parallel_sizes
from triaxis.engine.config.rules.check import is_legal, require_legal
from triaxis.engine.config.schema.dotted import with_value
from triaxis.engine.config.schema.recompute import RecomputeConfig
from triaxis.engine.config.tree import Config
from triaxis.engine.errors import ConfigError
from triaxis.engine.layout.rank_grid import ParallelSizes
from triaxis.engine.telemetry.outlets.format import gigabytes
from triaxis.launch.tuning.machine import GPUS_PER_NODE, Machine, gpus
from triaxis.models.predict.axis_sizes import in_all_sizes
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
        config: the run; tp, pp, ep, dp, sequence parallelism and `recompute` are replaced. Each pipeline's number of microbatches
            per step is rounded to four significant bits, and is at least pp. The microbatch size may be doubled.
        machine: the ranks and their memory.
        kept: batch sizes in `train` that stay as they are: `global_batch_size`, `micro_batch_size`.

    Raises:
        ConfigError: the config breaks a rule even with tp=1 and pp=1, or no layout fits. If none fits, the message names the layout
            that needs least memory.
    """
    alone = next(_layouts(config, machine, kept))
    require_legal(alone, "the run with tp=1 pp=1", machine.num_ranks, machine.ranks_per_node)
    usable_bytes = floor(machine.memory_bytes * (1 - MARGIN))
    too_large: list[_Least] = []
    for _, trials in groupby(legal_layouts(config, machine, kept), model_size):
        least = [_Least.of(trial, machine) for trial in trials]
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
    alone = next(_layouts(with_value(config, "train.micro_batch_size", 1), machine))
    for zero in (2, 3):
        trial = with_value(alone, "parallel.zero", zero)
        if not is_legal(trial, machine.num_ranks, machine.ranks_per_node):
            continue
        held = predict(trial, parallel_sizes(trial), nccl=machine.is_gpu).fullest
        if held.total <= chosen.usable_bytes:
            return zero, held
    return None


def legal_layouts(config: Config, machine: Machine, kept: Collection[str] = ()) -> Iterator[Config]:
    """Yield the run in every legal layout, the smallest tp x pp x ep first; the arguments are those of `choose_layout`.

    With tp > 1, a layout has sequence parallelism unless only plain tp is legal.
    """
    found = set[ParallelSizes]()
    for trial in sorted(_layouts(config, machine, kept), key=model_size):
        sizes = parallel_sizes(trial)
        if sizes not in found and is_legal(trial, machine.num_ranks, machine.ranks_per_node):
            found.add(sizes)
            yield trial


def model_size(config: Config) -> int:
    """Count the ranks of a layout that hold different parts of the model: tp x pp x ep."""
    return config.parallel.tp * config.parallel.pp * config.parallel.ep


def _layouts(config: Config, machine: Machine, kept: Collection[str] = ()) -> Iterator[Config]:
    """Yield the run in every layout without recomputation, tp=1 and pp=1 first; some break rules."""
    runtime = config.runtime.model_copy(update={"ranks_per_node": machine.ranks_per_node})
    config = config.model_copy(update={"recompute": RecomputeConfig(), "runtime": runtime})
    sized = in_all_sizes(config, machine.num_ranks, machine.ranks_per_node, ("tp", "pp", "ep", "sequence_parallel"))
    return (_adapted(each, kept) for each in sized)


def _adapted(config: Config, kept: Collection[str]) -> Config:
    """Set what follows from a layout's sizes: a global batch of whole microbatches, the experts' dispatch, what FP8 gathers."""
    parallel, train, fp8 = config.parallel, config.train, config.precision.fp8
    if "global_batch_size" not in kept:
        each = train.micro_batch_size * (parallel.dp or 1)
        batch = max(parallel.pp, four_digits(train.global_batch_size / each)) * each
        config = with_value(config, "train.global_batch_size", batch)
    if fp8 is not None and not parallel.sequence_parallel:
        config = with_value(config, "precision.fp8.gather", "bf16")
    return with_value(config, "kernels.dispatch", "all_to_all" if parallel.ep > 1 else "auto")


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
    trial = with_value(with_value(chosen.config, "train.micro_batch_size", size), "recompute", RecomputeConfig())
    larger = _fit(_Least.of(trial, machine), machine, chosen.usable_bytes)
    # More tokens may cut the head, which recomputes nothing.
    if (
        larger is None
        or larger.recompute.model_copy(update={"head_tokens": chosen.recompute.head_tokens}) != chosen.recompute
    ):
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
        trials = reversed(list(legal_layouts(config, larger, kept)))
        if any(_Least.of(trial, larger).held.total <= usable_bytes for trial in trials):
            return count
    return None
