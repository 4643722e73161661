"""Training, on one page. `build` assembles one rank's engine; `train` is the loop.

    Config -> ParallelSizes -> Topology -> partition -> [chunks] -> Schedule -> Executor -> GradBuffers -> DistributedOptimizer

Each arrow is a constructor argument: nothing is looked up. Every rank runs this page; what it does differs only by its
place in the topology.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine.checkpoint.saving import Checkpoints
from engine.comm.runtime import allocator_retries
from engine.comm.stop import Stop, StopRequest
from engine.comm.topology import Topology
from engine.config.schema import Config, batch_plan
from engine.kernels.registry import Kernels, open_kernels
from engine.layout.param_layout import layout_parameters
from engine.layout.partition import StageLayers, partition
from engine.numerics.precision import DTYPES, main_grad_dtype
from engine.optimizer.distributed import DistributedOptimizer
from engine.optimizer.grad_buffer import GradBuffers
from engine.optimizer.lr import learning_rate
from engine.pipeline import schedules
from engine.pipeline.executor import Executor
from engine.pipeline.programs import Programs
from engine.run.garbage import GarbageCollection
from engine.run.validation import StepSource, Validation
from engine.step import Chunk, Engine, PendingResult, StepResult
from engine.tensor_parallel.initial_weights import initialize
from engine.tensor_parallel.parameter import ShardedParameter

ModelBuilder = Callable[
    [Config, Topology, Kernels, Sequence[StageLayers]], tuple[Sequence[Chunk], dict[str, ShardedParameter]]
]
"""Builds this rank's chunks (on the meta device) and its parameters by name; `models.gpt.chunk.build_chunks`."""


class Observer(Protocol):
    """Who is told what happens (`engine.telemetry`); called on every rank.

    `end_step` closes the time of a step; `on_step` tells its numbers, later where they were still on the device.
    """

    def end_step(self) -> None: ...
    def on_step(self, step: int, result: StepResult, lr: float) -> None: ...
    def on_validation(self, step: int, loss: float) -> None: ...
    def on_validation_left_out(self, step: int) -> None: ...
    def on_allocator_retry(self, step: int, num_ranks: int) -> None: ...
    def phase(self, name: str) -> None: ...


class StepGuard(Protocol):
    """Who decides what a step's numbers mean for the run (`engine.resilience.guard`), on every rank alike."""

    def loss_limit(self, step: int) -> float: ...
    def before_update(self, step: int) -> None: ...
    def judge(self, step: int, result: StepResult) -> None: ...


def build(
    config: Config,
    topology: Topology,
    build_model: ModelBuilder,
    fill: Callable[[Iterable[ShardedParameter], int], None] = initialize,
    kernels: Kernels | None = None,
) -> Engine:
    """Assemble the engine of one rank: model chunks with initial weights, buffers, optimizer, schedules.

    `fill` gives the parameters their first values, from a seed (a footprint has none to give). `kernels` are those of the run;
    None: what `open_kernels` resolves.

    Raises:
        ConfigError: a kernel that the configuration names does not run here.
    """
    sizes, model = topology.sizes, config.model
    plan = batch_plan(config, sizes.dp)
    dtype = DTYPES[config.precision.dtype]
    grad_dtype = main_grad_dtype(dtype, config.precision.gradients)

    stages = partition(model.num_layers, sizes.pp, sizes.vpp, config.parallel.layers_per_stage)
    name = schedules.resolve(config.schedule.name, sizes.vpp)
    train_schedule = schedules.build(name, sizes.pp, sizes.vpp, plan.num_microbatches)
    forward_schedule = schedules.build("forward_only", sizes.pp, sizes.vpp, plan.num_microbatches)

    placement = train_schedule.placement
    mine = [stages[placement.stage_of(topology.coordinates.pp, chunk)] for chunk in range(sizes.vpp)]
    kernels = open_kernels(config, topology) if kernels is None else kernels
    chunks, parameters = build_model(config, topology, kernels, mine)

    layouts = layout_parameters(
        [parameter.record for parameter in parameters.values()],
        dp=topology.axis("dp").size,
        bucket_numel=config.optimizer.bucket_bytes // grad_dtype.itemsize,
    )
    replica_axes = {name: axis for name in ("tp", "kv_replicas", "ends") if (axis := topology.maybe_axis(name))}
    buffers = GradBuffers(layouts, parameters, dtype, grad_dtype, topology.device, topology.axis("dp"), replica_axes)
    fill(parameters.values(), config.train.seed)

    local_length = model.seq_length // (sizes.tp if config.parallel.sequence_parallel else 1)
    activation_shape = (local_length, config.train.micro_batch_size, model.hidden_size)
    return Engine(
        config=config,
        topology=topology,
        kernels=kernels,
        plan=plan,
        stages=stages,
        chunks=chunks,
        parameters=parameters,
        buffers=buffers,
        optimizer=DistributedOptimizer(buffers, config.optimizer, config.precision, kernels.choices.optimizer),
        executor=Executor(topology, [chunk.queue for chunk in chunks], activation_shape, dtype),
        train_programs=Programs(train_schedule),
        forward_programs=Programs(forward_schedule),
        count_retries=partial(allocator_retries, topology.device),
    )


@dataclass(frozen=True, slots=True)
class _Posted:
    """A step whose numbers were not read yet."""

    step: int
    lr: float
    result: PendingResult


def train(
    engine: Engine,
    batches: StepSource,
    open_validation: Callable[[], StepSource] | None,
    observer: Observer,
    checkpoints: Checkpoints,
    stop: StopRequest,
    guard: StepGuard,
    *,
    validation_is_due: bool = False,
) -> Stop | None:
    """Train to the last step, or until all ranks agree to stop; returns why it stopped, None after the last step.

    The samples of a step depend on `consumed_samples` alone.

    A step's numbers are read when the next one is posted, so that a GPU always has work; before a validation, a fingerprint or a
    save they are read at once. A stop that was agreed in a step comes after the one that is posted by then: it is saved whatever
    the interval. A stop also ends a validation (`engine/run/validation.py`): its step is saved, and the next attempt
    validates first.

    Args:
        engine: from `build`.
        batches: the training batches, at the first sample to consume.
        open_validation: opens the validation batches at their beginning; None: no validation.
        observer: told of every step and validation.
        checkpoints: saves what and when the configuration says.
        stop: what this rank is asked.
        guard: judges each step; what it raises ends the loop, on every rank after the same step.
        validation_is_due: the attempt before has stopped without the validation of its last step, which comes first now.

    Raises:
        DivergenceError: loss or gradients are not finite; on every rank, before any weight changes.
        SaveError: the last checkpoint could not be written; on every rank.
    """
    config, plan = engine.config, engine.plan
    validation = Validation(engine, open_validation, observer, stop)
    first_step = batches.consumed_samples // plan.samples_per_step
    unread: list[_Posted] = []
    stops = False

    def read(*, newest: bool) -> None:
        results = [posted.result.read() for posted in (unread if newest else unread[:-1])]
        for result in results:
            stop.hear(result.stop)
        if stop.agreed is not None and len(results) < len(unread):
            results.append(unread[-1].result.read())
        observer.end_step()
        for each, result in zip(unread, results, strict=False):
            guard.judge(each.step, result)
            observer.on_step(each.step, result, each.lr)
            checkpoints.agreed(result.flags)
            if result.num_retried and engine.receive_late():
                observer.on_allocator_retry(each.step, result.num_retried)
        del unread[: len(results)]

    def ends(*, is_last: bool, is_validated: bool) -> bool:
        return stop.agreed is not None and not (is_last and is_validated)

    if validation_is_due and validation.is_due(first_step - 1):
        is_validated = validation.make(first_step - 1)
        # What a stop would save here is the checkpoint that this attempt has begun from.
        stops = ends(is_last=first_step == plan.num_steps, is_validated=is_validated)

    with GarbageCollection(config.runtime.gc_interval) as garbage:
        for step in range(first_step, first_step if stops else plan.num_steps):
            observer.phase("data")
            microbatches = batches.next_step()
            observer.phase("forward_backward")
            counts = engine.forward_backward(microbatches)
            observer.phase("optimizer")
            lr = learning_rate(step, config.optimizer, plan.num_steps)
            guard.before_update(step)
            limit = guard.loss_limit(step)
            unread.append(_Posted(step, lr, engine.update(counts, lr, checkpoints.flags(), stop.flags(), limit)))
            is_last = step + 1 == plan.num_steps
            validates = validation.is_due(step)
            read(newest=is_last or validates or checkpoints.is_due(step + 1, is_last=is_last))
            is_validated = not validates or validation.make(step)
            stops = ends(is_last=is_last, is_validated=is_validated)
            observer.phase("checkpoint")
            checkpoints.after_step(
                step + 1,
                batches.consumed_samples,
                lr,
                is_last=is_last or stops,
                validation_is_due=not is_validated,
            )
            garbage.after_step(step + 1)
            if stops:
                break
    observer.phase("checkpoint")
    checkpoints.finish()
    return stop.agreed if stops else None
