"""One rank of a training run: puts a GPT, its data and its telemetry together and trains.

    python -m torch.distributed.run --nproc-per-node 8 --module launch.pretrain_gpt configs/gpt_tiny.yaml train.steps=20

`launch/pretrain_gpt.sh` starts it; so does srun with one task per GPU. The only place that knows engine, models and
telemetry at once.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.layout import describe_layout
from engine.checkpoint.manager import Checkpoints, RunFacts
from engine.checkpoint.resume import TOKENIZER, Beginning, begin
from engine.config import Config, ProfileConfig
from engine.data.corpus import entropies
from engine.data.datasets import Datasets, open_datasets
from engine.data.loader import Batches
from engine.data.sampler import NOTHING_SKIPPED
from engine.data.samples import SampleSource
from engine.data.skipped import SkippedRanges
from engine.data.tokenizers import load_tokenizer
from engine.errors import CheckpointError, TriaxisError
from engine.kernels import registry
from engine.pipeline.lowering import Instruction
from engine.resilience.guard import Guard
from engine.resilience.heartbeat import Heartbeat
from engine.resilience.notices import TroubleNotices
from engine.resilience.rollback import Rollback, train_through
from engine.runtime import RankEnvironment
from engine.signals import Stop, StopRequest
from engine.step import Engine
from engine.telemetry.checkpoint_notices import CheckpointNotices, say_beginning, say_stopped
from engine.telemetry.hub import Telemetry, open_telemetry
from engine.telemetry.metrics import Meter
from engine.telemetry.nvtx import NvtxRanges
from engine.telemetry.observer import TrainingObserver, peak_memory_of_ranks
from engine.telemetry.parameters import local_counts, round_counts
from engine.telemetry.profile import StepProfiler, StepWatcher
from engine.telemetry.rank_log import Streams, rank_log
from engine.telemetry.run_dir import RunDirectory, run_name
from engine.telemetry.step_times import StepTimes
from engine.telemetry.summary import End, Start, show_end, show_start
from engine.train import build
from launch.failure import AFTER, BROKE, INTERRUPTED, MISTAKE
from launch.hang_watch import open_hang_watch
from launch.launcher import FROM_SCRATCH
from launch.measuring import finish_step_times, open_slow_ranks, open_step_times
from launch.memory_snapshot import MemorySnapshot, remember_allocations
from launch.out_of_memory import explaining_memory
from launch.parent_death import end_with_parent
from launch.preflight import refuse_without_gpu
from launch.rank import Rank, join, read_config
from models.generate import generate
from models.gpt import attention_shape, build_chunks
from models.memory import settled
from models.specs import model_specs

PROMPT_TOKENS = 48
SAMPLE_TEMPERATURE = 0.8


def main(argv: Sequence[str]) -> int:
    """Run one rank of `[config.yaml, section.key=value ..., --from-scratch]`.

    What the exit code means stands in `launch/failure.py`.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    environment = RankEnvironment.from_variables(os.environ)
    words = [word for word in argv if word != FROM_SCRATCH]
    # A requeued or restarted job goes on from what it has saved since: the word was meant for its first start.
    is_first_start = not (environment.restart_count or int(os.environ.get("SLURM_RESTART_COUNT") or 0))
    try:
        config = read_config(words, environment)
        with join(config, environment) as rank:
            refuse_without_gpu(config, has_gpu=rank.topology.device.type == "cuda")
            directory = _open_directory(rank, Path(words[0]).stem, from_scratch=FROM_SCRATCH in argv and is_first_start)
            if directory is None:
                return MISTAKE
            if directory.finished is not None:
                if rank.number == 0:
                    print(directory.finished_message())
                return 0
            with rank_log(directory.rank_log(rank.number), show=rank.number == 0) as streams:
                return _logged(lambda: _train(rank, directory, streams))
    except TriaxisError as error:
        if environment.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _logged(run: Callable[[], int]) -> int:
    """Run it; what goes wrong is printed while the rank's log still listens."""
    try:
        return run()
    except TriaxisError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return BROKE


def _open_directory(rank: Rank, stem: str, *, from_scratch: bool) -> RunDirectory | None:
    """The run directory: rank 0 decides, the others follow; None on the others if it could not."""
    config, world = rank.config, rank.topology.axis("world")
    name = run_name(config, stem, os.environ)
    directory, error = None, None
    attempt_or_refused, finished = 0.0, 0.0
    if rank.number == 0:
        try:
            directory = RunDirectory.create(config, config.runtime.runs_dir, name, from_scratch=from_scratch)
            attempt_or_refused, finished = float(directory.attempt), float(directory.finished is not None)
        except TriaxisError as refused:
            error, attempt_or_refused = refused, -1.0
    attempt_or_refused, finished = world.agree([attempt_or_refused, finished], rank.topology.device, "run directory")
    if error is not None:
        raise error
    if attempt_or_refused < 0:
        return None
    if directory is None:
        directory = RunDirectory.join(config.runtime.runs_dir, name, int(attempt_or_refused))
        directory.finished = {} if finished else None
    return directory


def _train(rank: Rank, directory: RunDirectory, streams: Streams) -> int:
    """Build, begin, train; returns the exit code."""
    config, topology = rank.config, rank.topology
    stop, stopped = StopRequest(rank.number), None
    datasets = open_datasets(
        config.data, config.model.seq_length, config.train.seed, vocab_size=config.model.vocab_size
    )
    snapshot = _memory_snapshot(rank, directory)
    with explaining_memory(config, topology, snapshot=snapshot):
        engine = build(config, topology, build_chunks)
    described = describe(engine)
    chosen = settled(config, topology.sizes)
    meter = Meter(
        chosen,
        engine.plan,
        layers_per_chunk=described.layers_per_chunk,
        world_size=topology.grid.world_size,
        device_name=described.device_name,
        attempt=directory.attempt,
    )
    telemetry = open_telemetry(
        config,
        directory,
        is_logging_rank=rank.number == 0,
        streams=streams,
        num_steps=engine.plan.num_steps,
        show_mfu=meter.peak is not None,
        layout={**describe_layout(engine), "sizes": str(topology.sizes), "backend": described.device},
    )
    try:
        counted = count_parameters(engine)
        if telemetry.report is not None:
            start = Start(
                config,
                engine.plan,
                described.layout,
                described.device,
                described.kernels,
                counted,
                recompute=chosen.recompute,
            )
            show_start(telemetry.report, directory, meter, start)
        data = {"samples": datasets.fingerprint}
        if not config.data.synthetic:
            data[TOKENIZER] = load_tokenizer(config.data.tokenizer).identity
        beginning = begin(engine, directory.checkpoints(config), has_saved=directory.has_saved, data=data)
        say_beginning(telemetry, directory, beginning)
        facts = RunFacts(
            run=directory.path.name,
            attempt=directory.attempt,
            data=data,
            lineage=beginning.lineage,
            wandb_id=directory.known_wandb_id,
            shapes={spec.name: spec.shape for spec in model_specs(config.model)},
            history=beginning.history,
        )
        notices = CheckpointNotices(telemetry, directory)
        with closing(Checkpoints(engine, directory.checkpoints(config), facts, notices)) as checkpoints:
            stop.listen()
            stopped = _train_and_report(
                engine, datasets, beginning, facts, checkpoints, directory, telemetry, meter, stop, snapshot
            )
    except CheckpointError as error:
        telemetry.event("failed", error=f"CheckpointError: {error}")
        if stop.agreed is not Stop.PREEMPTED:
            raise
        # Preempted all the same: the next attempt goes on from the newest checkpoint that is complete.
        print(f"error: {error}", file=sys.stderr)
        stopped = stop.agreed
    except BaseException as error:
        telemetry.event("failed", error=f"{type(error).__name__}: {error}")
        raise
    finally:
        telemetry.close()
        directory.close()
    if stopped is None:
        return 0
    # Nobody leaves before rank 0 has closed its files: a launcher ends all ranks with the first one that ends with a code.
    topology.axis("world").agree([0.0], topology.device, "stop")
    return AFTER[stopped]


def _train_and_report(
    engine: Engine,
    datasets: Datasets,
    beginning: Beginning,
    facts: RunFacts,
    checkpoints: Checkpoints,
    directory: RunDirectory,
    telemetry: Telemetry,
    meter: Meter,
    stop: StopRequest,
    snapshot: MemorySnapshot | None,
) -> Stop | None:
    config, history = engine.config, facts.history
    valid = datasets.valid
    trouble = TroubleNotices(telemetry)

    heartbeat, hang_watch = open_hang_watch(engine, directory, telemetry)

    def reread(consumed_samples: int) -> Batches:
        return open_batches(engine, datasets.train, consumed_samples, history.skipped)

    def open_training(consumed_samples: int) -> Batches:
        heartbeat.begin(consumed_samples // engine.plan.samples_per_step)
        return reread(consumed_samples)

    guard = Guard(engine, history, reread, trouble)
    rollback = Rollback(engine, directory.checkpoints(config), facts.data, history, trouble)
    times = open_step_times(engine, directory, beginning.state.step)
    heartbeat.listen(engine.topology.ledger)
    watchers = _watchers(engine, directory, telemetry, beginning.state.step, times, heartbeat)
    observer = TrainingObserver(
        telemetry,
        meter,
        engine.topology.device,
        watchers=watchers,
        times=times,
        slow_ranks=open_slow_ranks(engine, times),
    )
    started_seconds = time.monotonic()
    hang_watch.start()
    try:
        with explaining_memory(config, engine.topology, engine, snapshot):
            validation = None if valid is None else lambda: open_batches(engine, valid)
            stopped, consumed_samples = train_through(
                engine,
                beginning.state.consumed_samples,
                open_training,
                validation,
                observer,
                checkpoints,
                stop,
                guard,
                rollback,
            )
            finish_step_times(times, directory, telemetry)
    finally:
        hang_watch.close()
        for watcher in watchers:
            watcher.close()
    seconds = time.monotonic() - started_seconds
    telemetry.flush()
    held = peak_memory_of_ranks(engine.topology)
    if stopped is not None:
        step = consumed_samples // engine.plan.samples_per_step
        say_stopped(telemetry, stopped, step, is_saved=config.checkpoint.interval is not None, peak_memory_bytes=held)
        return stopped
    steps = engine.plan.num_steps
    prompt, text = _write_text(engine, valid) if valid is not None else ("", None)
    if telemetry.report is not None:
        end = End(steps, seconds, observer.loss, observer.val_loss, corpus_entropies(config), prompt, text)
        show_end(telemetry.report, directory, end)
        telemetry.event("finished", steps=steps, loss=observer.loss, val_loss=observer.val_loss, peak_memory_bytes=held)
        directory.finish(steps=steps, loss=observer.loss, val_loss=observer.val_loss)
    return None


def _memory_snapshot(rank: Rank, directory: RunDirectory) -> MemorySnapshot | None:
    """What this rank writes when it runs out of memory, its history from now on in it if asked for; None on the CPU."""
    if rank.topology.device.type != "cuda":
        return None
    has_history = rank.config.telemetry.memory_history
    if has_history:
        remember_allocations()
    return MemorySnapshot(directory.memory_snapshot(rank.number), has_history=has_history)


def _watchers(
    engine: Engine,
    directory: RunDirectory,
    telemetry: Telemetry,
    steps_made: int,
    times: StepTimes | None,
    heartbeat: Heartbeat,
) -> list[StepWatcher]:
    """Who follows this rank through its steps, listening to its executor too."""
    watchers: list[StepWatcher] = [heartbeat] if times is None else [heartbeat, times]
    if engine.config.telemetry.nvtx:
        watchers.append(NvtxRanges(steps_made))
    wanted = engine.config.telemetry.profile
    if wanted is not None and engine.topology.rank in wanted.ranks:
        watchers.append(_profiler(engine, directory, telemetry, steps_made, wanted))

    def tell_all(instruction: Instruction | None) -> None:
        for watcher in watchers:
            watcher.instruction(instruction)

    engine.executor.observer = tell_all
    return watchers


def _profiler(
    engine: Engine, directory: RunDirectory, telemetry: Telemetry, steps_made: int, wanted: ProfileConfig
) -> StepProfiler:
    rank = engine.topology.rank

    def written(path: Path) -> None:
        telemetry.event("profiled", path=str(path.relative_to(directory.path)))
        if telemetry.report is not None:
            telemetry.report.say(f"trace of rank {rank}: {path}")

    return StepProfiler(wanted, directory.profile(rank, wanted), engine.topology.device, steps_made, written)


def open_batches(
    engine: Engine, dataset: SampleSource, consumed_samples: int = 0, skipped: SkippedRanges = NOTHING_SKIPPED
) -> Batches:
    """This rank's batches of a dataset, from the first sample that is not consumed on."""
    train_config, dp = engine.config.train, engine.topology.axis("dp")
    return Batches(
        dataset,
        global_batch_size=train_config.global_batch_size,
        micro_batch_size=train_config.micro_batch_size,
        dp=dp.size,
        dp_rank=dp.index,
        consumed_samples=consumed_samples,
        device=engine.topology.device,
        skipped=skipped,
    )


def count_parameters(engine: Engine) -> dict[str, int]:
    """Parameters by module, counted on all ranks."""
    topology = engine.topology
    axes = {name: topology.maybe_axis(name) for name in ("tp", "kv_replicas", "ends")}
    shares = local_counts(
        [parameter.record for parameter in engine.parameters.values()],
        topology.axis("dp").size,
        {name: axis.size for name, axis in axes.items() if axis is not None},
    )
    sums = topology.axis("world").agree(list(shares.values()), topology.device, "parameter count")
    return round_counts(dict(zip(shares, sums, strict=True)))


@dataclass(frozen=True, slots=True)
class Description:
    """The run in words, for the banner."""

    layout: str
    schedule: str
    device: str
    device_name: str
    kernels: str
    layers_per_chunk: tuple[int, ...]


def describe(engine: Engine) -> Description:
    """Layout, schedule and device of a built engine."""
    topology, config = engine.topology, engine.config
    grid, schedule = topology.grid, engine.train_program.schedule.name
    nodes = "1 node" if grid.num_nodes == 1 else f"{grid.num_nodes} nodes"
    sequence = ", sequence parallel" if config.parallel.sequence_parallel else ""
    if topology.device.type == "cuda":
        device_name = torch.cuda.get_device_name(topology.device)
        device = f"{device_name}, {'gloo through the host' if topology.staged else 'nccl'}"
    else:
        threads = torch.get_num_threads()
        device_name = "cpu"
        device = f"cpu, gloo, {threads} thread{'s' if threads > 1 else ''} per rank"
    return Description(
        layout=f"{topology.sizes}: {grid.world_size} ranks on {nodes}, {schedule}{sequence}",
        schedule=schedule,
        device=device,
        device_name=device_name,
        kernels=registry.describe(config.kernels, attention_shape(config, topology)),
        layers_per_chunk=tuple(len(stage.layers) for stage in engine.stages),
    )


def corpus_entropies(config: Config) -> dict[str, float]:
    """What simpler models of the training corpus reach, in nats per token; the first corpus stands for a blend."""
    if config.data.synthetic:
        return {}
    measured = entropies(config.data.train[0][1], config.model.vocab_size)
    return {"uniform": measured.uniform, "unigram entropy": measured.unigram, "bigram entropy": measured.bigram}


def _write_text(engine: Engine, valid: SampleSource) -> tuple[str, str | None]:
    """A beginning from the validation data, and how the model goes on; every rank takes part."""
    config = engine.config
    if config.telemetry.sample_tokens == 0 or config.data.synthetic:
        return "", None
    prompt = [int(token) for token in valid[0].tokens[:PROMPT_TOKENS]]
    tokens = generate(
        engine, prompt, config.telemetry.sample_tokens, temperature=SAMPLE_TEMPERATURE, seed=config.train.seed
    )
    tokenizer = load_tokenizer(config.data.tokenizer)
    return tokenizer.decode(prompt), tokenizer.decode(tokens)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's teardown: a thread that waits for a dead peer must not keep the rank alive.
    os._exit(code)
