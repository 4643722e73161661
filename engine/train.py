"""Training, on one page. `build` assembles one rank's engine; `train` is the loop, and `train_steps` its inner one.

    Config -> ParallelSizes -> Topology -> partition -> [chunks] -> Schedule -> Executor -> GradBuffers -> DistributedOptimizer

An arrow means that the left object is an argument for building the right one; there are no global look-ups. Every rank runs this
page. What a rank does differs only by its place in the topology.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from triaxis.engine.activations.saved_tensors import TensorObserver, unobserved
from triaxis.engine.checkpoint.format.manifest import TrainingState
from triaxis.engine.checkpoint.saving import CheckpointSaver
from triaxis.engine.comm.agreement import StepFlags
from triaxis.engine.comm.stop import Stop, StopRequest
from triaxis.engine.comm.topology import Topology
from triaxis.engine.config.quantities.plan import batch_plan, local_seq_length, stages_of
from triaxis.engine.config.quantities.state_plan import layout_of
from triaxis.engine.config.tree import Config
from triaxis.engine.device.allocator import retry_counter
from triaxis.engine.kernels.registry import Kernels, open_kernels
from triaxis.engine.layout.partition import StageLayers
from triaxis.engine.layout.shard_spec import REDUCE_AXES
from triaxis.engine.numerics.precision import DTYPES
from triaxis.engine.optimizer.distributed import DistributedOptimizer
from triaxis.engine.optimizer.grad_buffer import GradBuffers
from triaxis.engine.optimizer.lr import rate_of
from triaxis.engine.optimizer.own_rule import own_rule
from triaxis.engine.pipeline import schedules
from triaxis.engine.pipeline.executor import Executor, InstructionObserver
from triaxis.engine.pipeline.forwards import of_forward
from triaxis.engine.pipeline.programs import Programs
from triaxis.engine.pipeline.work import WorksOf, eager_works
from triaxis.engine.run.cuda_graphs import CudaGraphs
from triaxis.engine.run.garbage import GarbageCollection
from triaxis.engine.run.step_parts import StepPart
from triaxis.engine.run.validation import StepSource, Validation, ValidationObserver
from triaxis.engine.step import Chunk, Engine
from triaxis.engine.step_limits import StepLimits
from triaxis.engine.step_result import StepResult
from triaxis.engine.steps_in_flight import FinishedStep, RollbackRequested, StepsInFlight
from triaxis.engine.tensor_parallel.initial_weights import initialize
from triaxis.engine.tensor_parallel.parameter import ShardedParameter

ModelBuilder = Callable[
    [Config, Topology, Kernels, Sequence[StageLayers], TensorObserver],
    tuple[Sequence[Chunk], dict[str, ShardedParameter]],
]
"""Function that builds this rank's chunks (on the meta device) and parameters by name: `triaxis.models.gpt.chunk.build_chunks`."""


class Observer(ValidationObserver, Protocol):
    """Observer of the training loop (`triaxis.engine.telemetry`), called on every rank; steps count from 0.

    `begin` gets the number of steps made so far, when the run begins and after each rollback. `on_batch` gets a step's microbatches
    before its forward. `end_step` ends a step's measured time. `on_step` gets a step's numbers once the host has read them, mostly
    during the next step. `on_allocator_retry` reports that in step `step` the allocators of `num_ranks` ranks had to free memory
    and try again. From then on, receives are launched only just before their use.
    """

    def begin(self, steps_made: int) -> None: ...
    def on_batch(self, microbatches: Sequence[Any]) -> None: ...
    def end_step(self) -> None: ...
    def on_step(self, step: int, result: StepResult, lr: float) -> None: ...
    def on_allocator_retry(self, step: int, num_ranks: int) -> None: ...


class StepGuard(Protocol):
    """Judge of each step's numbers (`triaxis.engine.resilience.guard`); it decides the same on every rank.

    `before_update` is called between a step's backward and its update. `limits` gives the loss and gradient norm above which that
    update must not happen. `judge` is called once the host has read the step's numbers. It raises an error to end the run, or
    `RollbackRequested`.
    """

    def limits(self, step: int) -> StepLimits: ...
    def before_update(self, step: int) -> None: ...
    def judge(self, step: int, result: StepResult) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One rank's engine, and everything that follows its steps.

    Attributes:
        engine: engine from `build`.
        open_batches: function that opens the training batches after a number of consumed samples, without the samples that the
            configuration or earlier rollbacks exclude.
        open_validation: function that opens the validation batches at their beginning; None: no validation.
        observer: receiver for every step and validation.
        checkpoints: saver of the run's checkpoints.
        stop: this rank's stop requests, and the stop that all ranks agreed on.
        guard: judge of each step; its exceptions end the loop, on every rank after the same step.
        rollback: function that loads the newest checkpoint from before the requested step, and excludes the requested samples from
            then on.
    """

    engine: Engine
    open_batches: Callable[[int], StepSource]
    open_validation: Callable[[], StepSource] | None
    observer: Observer
    checkpoints: CheckpointSaver
    stop: StopRequest
    guard: StepGuard
    rollback: Callable[[RollbackRequested], TrainingState]


def build(
    config: Config,
    topology: Topology,
    build_model: ModelBuilder,
    fill: Callable[[Iterable[ShardedParameter], int], None] = initialize,
    kernels: Kernels | None = None,
    observers: Sequence[InstructionObserver] = (),
    on_saved: TensorObserver = unobserved,
) -> Engine:
    """Assemble one rank's engine: model chunks with initial weights, buffers, optimizer, schedules.

    Args:
        config: resolved configuration; its `recompute` section holds no `auto`
            (`triaxis.models.predict.rank_memory.resolve_recompute`).
        topology: this rank's process groups; observers given to `Topology.observed` see each wait for communication.
        fill: function that writes initial values into parameters, from a seed; a footprint (`launch/footprint`) leaves them empty.
        kernels: the run's kernels; None: `open_kernels` opens them.
        observers: instruction observers for every program that the engine runs.
        on_saved: callback for each tensor that stays in device memory for a backward.

    Raises:
        ConfigError: a configured kernel does not run here.
    """
    sizes, model = topology.sizes, config.model
    plan = batch_plan(config, sizes.dp)
    dtype = DTYPES[config.precision.dtype]

    stages = stages_of(config)
    forward_schedule = of_forward(sizes, plan.num_microbatches)

    mine = [stages[stage] for stage in forward_schedule.placement.stages_on(topology.coordinates.pp)]
    kernels = open_kernels(config, topology) if kernels is None else kernels
    chunks, parameters = build_model(config, topology, kernels, mine, on_saved)
    train_schedule = schedules.of_step(config, sizes)

    layouts = layout_of(config, sizes, [parameter.record for parameter in parameters.values()])
    replica_axes = {name: axis for name in ("tp", "kv_replicas", "ends") if (axis := topology.optional_axis(name))}
    owners = {name: axis for name in REDUCE_AXES if (axis := topology.optional_axis(sizes.owner_axis(name)))}
    state_replicas = topology.optional_axis("dp_replicas")
    buffers = GradBuffers(layouts, parameters, config.precision, topology.device, owners, replica_axes, state_replicas)
    buffers.write(parameters, lambda some: fill(some, config.train.seed))

    works: WorksOf = eager_works
    if kernels.choices.graphs == "on":
        works = graphs = CudaGraphs(buffers, topology.ledger)
        topology.before_close(graphs.release)
    activation_shape = (local_seq_length(config), config.train.micro_batch_size, model.hidden_size)
    return Engine(
        config=config,
        topology=topology,
        kernels=kernels,
        plan=plan,
        stages=stages,
        chunks=chunks,
        parameters=parameters,
        buffers=buffers,
        optimizer=DistributedOptimizer(
            buffers,
            config.optimizer,
            config.precision,
            kernels.choices.optimizer == "compiled",
            kernels.apex,
            own_rule(config),
        ),
        executor=Executor(
            topology, [chunk.queue for chunk in chunks], activation_shape, dtype, tuple(observers), works
        ),
        train_programs=Programs(train_schedule),
        forward_programs=Programs(forward_schedule),
        count_retries=retry_counter(topology.device),
    )


def train(run: TrainingRun, consumed_samples: int, *, validation_is_due: bool = False) -> tuple[Stop | None, int]:
    """Train from `consumed_samples` to the last step in the engine's phase, or until all ranks agree to stop.

    If the guard wants a step undone, the run rolls back to a checkpoint, as often as `resilience.max_rollbacks` allows.

    Args:
        consumed_samples: training samples consumed so far, by the checkpoint or the previous attempt.
        validation_is_due: whether the previous attempt stopped before it validated its last step; that validation comes first now.

    Returns:
        Why the run stopped, and the number of consumed samples. The reason is None after the run's last step, and
        `Stop.NEXT_PHASE` after the last step in an earlier phase.

    Raises:
        DivergenceError: a step diverged, and `resilience` has no remedy left; raised on every rank, before any weight changes.
        ReplicaError: weights that must be equal on several ranks differ.
        SaveError: the last checkpoint could not be written; raised on every rank.
    """
    while True:
        run.observer.begin(run.engine.plan.phase.step_after(consumed_samples))
        with closing(run.open_batches(consumed_samples)) as batches:
            try:
                stopped = train_steps(run, batches, validation_is_due=validation_is_due)
                return stopped, batches.consumed_samples
            except RollbackRequested as request:
                run.checkpoints.settle()
                state = run.rollback(request)
                consumed_samples, validation_is_due = state.consumed_samples, state.validation_is_due


def train_steps(run: TrainingRun, batches: StepSource, *, validation_is_due: bool = False) -> Stop | None:
    """Run the steps whose samples follow `batches.consumed_samples`; return why the run stopped, None after its last step.

    A step's samples depend on `consumed_samples` alone. In a run with phases, only the engine's phase is run. At its end the run
    saves and stops, because the next phase may have another batch size, sequence length or layout.

    A step's numbers are read when the next one is posted; before a validation, a fingerprint or a save they are read at once. After
    an agreed stop, the run ends with the newest posted step, which is saved whatever the interval. A stop also ends a running
    validation (`engine/run/validation.py`): the step before it is saved, and the next attempt validates first.
    """
    engine, observer, checkpoints, stop = run.engine, run.observer, run.checkpoints, run.stop
    plan, phase = engine.plan, engine.plan.phase
    end_step, first_step = phase.end_step, phase.step_after(batches.consumed_samples)
    validation = Validation(engine, run.open_validation, observer, stop)
    in_flight, stops, ahead = StepsInFlight(), False, None

    if validation_is_due and validation.is_due(first_step - 1):
        is_validated = validation.make(first_step - 1)
        # A stop here has nothing to save, since this attempt began from that very checkpoint.
        stops = stop.agreed is not None and not (is_validated and first_step == end_step)

    with GarbageCollection(engine.config.runtime.gc_interval) as garbage:
        for step in range(first_step, first_step if stops else end_step):
            is_last, validates = step + 1 == end_step, validation.is_due(step)
            observer.enter(StepPart.DATA)
            microbatches = batches.next_step()
            observer.on_batch(microbatches)
            # The backward divides by all ranks' label counts. They are summed a step ahead, so they have arrived when it begins.
            labels, ahead = ahead, None if is_last else engine.post_labels(batches.next_labels())

            observer.enter(StepPart.FORWARD_BACKWARD)
            losses = engine.forward_backward(microbatches, labels=labels)

            observer.enter(StepPart.OPTIMIZER)
            run.guard.before_update(step)
            lr = rate_of(engine.config, phase.tokens_before(step), plan.tokens_per_step, plan.num_tokens)
            flags = StepFlags(checkpoints.flags(), stop.flags())
            in_flight.post(step, lr, engine.update(losses, lr, flags, run.guard.limits(step)))
            reads_all = is_last or validates or checkpoints.is_due(step + 1, is_last=is_last)
            finished = in_flight.read(stop, newest=reads_all)
            observer.end_step()
            for each in finished:
                _after_update(run, each)

            is_validated = not validates or validation.make(step)
            stops = stop.agreed is not None and not (is_validated and is_last)

            observer.enter(StepPart.CHECKPOINT)
            consumed, ends = batches.consumed_samples, is_last or stops
            checkpoints.after_step(step + 1, consumed, lr, is_last=ends, validation_is_due=not is_validated)
            garbage.after_step(step + 1)
            if stops:
                break
    observer.enter(StepPart.CHECKPOINT)
    checkpoints.finish()
    if stops:
        return stop.agreed
    return None if end_step == plan.num_steps else Stop.NEXT_PHASE


def _after_update(run: TrainingRun, finished: FinishedStep) -> None:
    """Judge a step whose numbers were read, and pass them to the observer and the saver.

    If an allocator had to free memory and retry, every later receive is launched only just before its use.
    """
    result = finished.result
    run.guard.judge(finished.step, result)
    run.observer.on_step(finished.step, result, finished.lr)
    run.checkpoints.agreed(result.flags.save)
    num_retried = int(result.flags.retried)
    if num_retried and run.engine.receive_late():
        run.observer.on_allocator_retry(finished.step, num_retried)
